// SPDX-License-Identifier: Apache-2.0
// Carries records of a fixed size over a Unix stream socket, with descriptors attached.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/fd.h"

namespace bps::transport::shm {

inline constexpr std::size_t kMaxFds = 4;

// Sends all of `record` and `fds` at once, or nothing. Returns kAgain, with errno, when the socket is full or the
// system is short of something (is_shortage()), as when as many files of this user are on the way as it may have open.
// Returns kPeerLost, with errno, when the socket is closed.
Status send_record(int socket, std::span<const std::byte> record, std::span<const int> fds);
// Does the same, but waits.
Status send_record(int socket, std::span<const std::byte> record, std::span<const int> fds, const Deadline& deadline);
// Receives records without blocking. A part of a record stays here until the rest has come, so that nobody waits for a
// peer that sends slowly. The kernel drops descriptors for which this process has no room: fds() is then shorter than
// what the peer sent.
class RecordReader {
 public:
  explicit RecordReader(std::size_t size) : record_(size) {}

  // Returns kOk when a record is here, which stays until the next call, and kAgain when it is not here yet.
  Status receive(int socket);
  // Does the same, but waits.
  Status receive(int socket, const Deadline& deadline);
  std::span<const std::byte> record() const { return record_; }
  std::vector<Fd>& fds() { return fds_; }

 private:
  std::vector<std::byte> record_;
  std::size_t have_ = 0;
  std::vector<Fd> fds_;
};

// Returns true when the other side has closed the socket. The kernel also closes it at the end of a process, after the
// last thread has lost its memory.
bool is_closed(int socket);

}  // namespace bps::transport::shm
