// SPDX-License-Identifier: Apache-2.0
// Ends the waits of a thread before their deadlines: at Ctrl-C, or when what the thread waits for is being shut down.
//
// A thread of the application sets a check for the time of a call into the library. Each wait of that thread then calls
// it every kWaitSlice, with no lock held. The check may run any code, and ends the wait by an exception. The threads of
// the library have no check, and sleep without slices.
#pragma once

#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>

#include "core/clock.h"

namespace bps {

inline constexpr std::chrono::milliseconds kWaitSlice{150};  // a Ctrl-C is answered within half a second

// Sets a check for the calling thread, besides those that it has, until the end of the scope.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<void()> check);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  friend void check_interrupt();
  const std::function<void()> check_;
  InterruptScope* const outer_;
};

// Throws what a check of the calling thread throws.
void check_interrupt();
// Returns when a wait that begins now must call the checks next, or has reached its deadline.
Clock::time_point end_of_slice(const Deadline& deadline);

// Calls poll(2) for one descriptor. Returns 0 once the deadline has passed.
int poll_until(pollfd& descriptor, const Deadline& deadline);
void sleep_until(const Deadline& deadline);

// Waits under `lock` until done(). Returns false at the deadline.
template <typename Done>
bool wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const Deadline& deadline,
                Done done) {
  while (!changed.wait_until(lock, end_of_slice(deadline), done)) {
    if (deadline.passed()) return false;
    lock.unlock();
    check_interrupt();
    lock.lock();
  }
  return true;
}

}  // namespace bps
