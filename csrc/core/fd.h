// SPDX-License-Identifier: Apache-2.0
// Owns a file descriptor, and closes it. A process that is forked does not get it: see fork.h.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <utility>

#include "core/fork.h"

namespace bps {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd), forks_(fork_count()) {
    if (fd_ >= 0) close_in_children(fd_);
  }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), forks_(other.forks_) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      forks_ = other.forks_;
    }
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset() {
    if (fd_ >= 0 && forks_ == fork_count()) {  // else it was closed at the fork, and the number may be another file's
      keep_in_children(fd_);
      ::close(fd_);
    }
    fd_ = -1;
  }

 private:
  int fd_ = -1;
  std::uint32_t forks_ = 0;  // the number of forks when it was made
};

// Makes an eventfd readable. Signal handlers may call it, too.
inline void ring(int doorbell) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto n = ::write(doorbell, &one, sizeof one);
}

// Makes the eventfd unreadable. Returns true when it was readable, and does not block.
inline bool take_rings(int doorbell) {
  std::uint64_t count = 0;
  return ::read(doorbell, &count, sizeof count) == sizeof count;
}

}  // namespace bps
