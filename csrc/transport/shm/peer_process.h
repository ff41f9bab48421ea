// SPDX-License-Identifier: Apache-2.0
// The process at the other end of a connection of this host: its memory is read and written by its number, and it is
// ended by a handle, which stays valid when the number is another process's. Threading: the loop's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/error.h"
#include "core/fd.h"

namespace bps::transport::shm {

class PeerProcess {
 public:
  using Probe = std::array<std::byte, 16>;

  explicit PeerProcess(int socket);

  int number() const { return number_; }
  bool is_this() const { return is_this_; }  // both ends of a connection of a test
  bool has_handle() const { return static_cast<bool>(handle_); }
  // False also where there is no handle.
  bool has_ended() const;
  // has_ended() tells when none of its threads runs any more. One that the kernel holds runs no code of its own from
  // here on either.
  void end() const;

  // True when the kernel lets this process read and write the peer's memory, and the probe is there.
  bool has_at(std::uint64_t address, const Probe& probe) const;
  // kPeerLost: it has ended, perhaps before all was copied.
  Status copy(bool read, std::byte* here, std::uint64_t there, std::uint64_t length) const;

 private:
  const int number_;  // 0: it lives in another pid namespace
  const bool is_this_;
  const Fd handle_;  // empty: this process may not ask for it, and so not end it either
};

}  // namespace bps::transport::shm
