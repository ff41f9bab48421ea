// SPDX-License-Identifier: Apache-2.0
// Fixed-size records over a Unix stream socket, with descriptors attached.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "core/fd.h"

namespace bps::transport::shm {

inline constexpr std::size_t kMaxFds = 4;

// Sends all of `record` and `fds` at once, or nothing: kAgain, with errno, when the socket is full or the system is
// short of something (is_shortage()), as when this user's files on the way are as many as its limit on open files.
// kPeerLost, with errno, when the socket is closed.
Status send_record(int socket, std::span<const std::byte> record, std::span<const int> fds);
// The same, but waits.
Status send_record(int socket, std::span<const std::byte> record, std::span<const int> fds, const Deadline& deadline);
// Receives records without blocking. What has come of one stays here until the rest has, so that nobody waits for a
// peer that sends slowly. The kernel drops descriptors for which this process has no room: fds() is then shorter than
// what the peer sent.
class RecordReader {
 public:
  explicit RecordReader(std::size_t size) : record_(size) {}

  // kOk: a record is here, until the next call. kAgain: not yet.
  Status receive(int socket);
  // The same, but waits.
  Status receive(int socket, const Deadline& deadline);
  std::span<const std::byte> record() const { return record_; }
  std::vector<Fd>& fds() { return fds_; }

 private:
  std::vector<std::byte> record_;
  std::size_t have_ = 0;
  std::vector<Fd> fds_;
};

// True when the other side has closed the socket, which the kernel also does at the end of a process, after its last
// thread has lost its memory.
bool is_closed(int socket);

}  // namespace bps::transport::shm
