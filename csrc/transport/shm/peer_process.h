// SPDX-License-Identifier: Apache-2.0
// Reaches the process at the other end of a connection of this host. Its memory is read and written by its number. It
// is ended by a handle, which stays valid when another process has that number. Belongs to the thread of the loop.
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
  bool is_this() const { return is_this_; }  // true where both ends of a connection are in this process, as in tests
  bool has_handle() const { return static_cast<bool>(handle_); }
  // Returns false where there is no handle, too.
  bool has_ended() const;
  // Ends the process. has_ended() tells when none of its threads runs any more. A thread that the kernel holds runs no
  // code of its own from here on either.
  void end() const;

  // Returns true when the kernel lets this process read and write the peer's memory, and the probe is there.
  bool has_at(std::uint64_t address, const Probe& probe) const;
  // Returns kPeerLost when the peer has ended, perhaps before all was copied.
  Status copy(bool read, std::byte* here, std::uint64_t there, std::uint64_t length) const;

 private:
  const int number_;  // 0: the peer lives in another pid namespace
  const bool is_this_;
  const Fd handle_;  // empty: this process may not ask for one, and so cannot end the peer
};

}  // namespace bps::transport::shm
