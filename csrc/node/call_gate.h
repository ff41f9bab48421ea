// SPDX-License-Identifier: Apache-2.0
// Keeps what threads use in their calls until they have returned. It counts the calls in progress, refuses further ones
// once the gate is closed, and runs what may only happen when there are none.
//
// Any thread may use it. A thread may close the gate within a call of its own, in a signal handler for example. A call
// costs one atomic addition at either end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

#include "core/clock.h"

namespace bps::node {

class CallGate {
 public:
  // Marks one call in progress. It lives on the caller's stack.
  class Call {
   public:
    // Throws kNotInitialized when the gate is closed, or is that of the parent process. Throws kRoundAborted when calls
    // go on elsewhere, and kInvalidArgument within a codec of the program, which a loop runs.
    explicit Call(CallGate& gate);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    friend class CallGate;
    CallGate& gate_;
    Call* const outer_;  // the call of this thread within which this one was made, on whatever gate
  };

  enum class After : std::uint8_t { kNothing, kNextView };  // where calls go on that come after the end

  CallGate();
  // Closes the gate. Returns false when it was closed before.
  bool close(After after);
  // Comes once, on a closed gate. Waits for calls of other threads, up to the deadline, then runs `task`. If calls are
  // still in progress then, perhaps the calling thread's own, the last of them runs it. `task` must not throw.
  void run_when_empty(std::function<void()> task, const Deadline& deadline);

 private:
  static constexpr std::uint32_t kClosed = 1U << 31;
  static constexpr std::uint32_t kGoesOn = 1U << 30;  // only with kClosed
  static constexpr std::uint32_t kCalls = kGoesOn - 1;
  void leave();
  std::uint32_t own_calls() const;

  const std::uint32_t forks_;
  std::atomic<std::uint32_t> state_{0};  // how many calls are in progress, and how it was closed
  std::mutex mutex_;                     // guards the rest, on a closed gate
  std::condition_variable changed_;
  std::function<void()> task_;
};

}  // namespace bps::node
