// SPDX-License-Identifier: Apache-2.0
// Keeps the state of an operation, and lets callers wait for its end.
//
//   kPending ──► kFailing ──► kFailed
//     ▲  │           └──────► kCompleteAnyway
//     │  └──────────────────► kComplete
//     └─────── restart() ─────────┘
//
// docs/notes/operations.md has a sentence for each transition. Any thread may call this. The state is a futex, on which
// callers sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "core/clock.h"
#include "transport/progress.h"

namespace bps::worker {

class Completion {
 public:
  Completion() = default;
  ~Completion();
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  // Returns true when the caller has its memory again, and its thread may return.
  bool is_done() const { return is_end(state_.load(std::memory_order_acquire)); }
  // Returns true when something has failed, and what is left of the operation is being cancelled.
  bool is_failing() const { return state_.load(std::memory_order_acquire) == State::kFailing; }
  bool has_failed() const { return state_.load(std::memory_order_acquire) == State::kFailed; }
  // Returns true when no worker loop touches the operation any more, so that it may be used again or vanish.
  bool is_over() const { return is_over_.load(std::memory_order_acquire); }
  // Returns true when it may be made pending again, because no loop has been told to cancel it.
  bool is_reusable() const;

  // Returns false when the operation is failing already, or done.
  bool begin_failing();
  // Notes that a partition has ended without its answer. An operation whose answers all came is complete even if it was
  // failing.
  void mark_incomplete();
  // Notes that the result went to pages that the process has given back meanwhile. So the operation fails when it is
  // over, on this rank only.
  void mark_given_back() { missing_.store(Missing::kMemory, std::memory_order_relaxed); }
  // Notes that a GPU may not see the result in its memory, to the same effect.
  void mark_unseen() { missing_.store(Missing::kSight, std::memory_order_relaxed); }
  bool is_incomplete() const { return missing_.load(std::memory_order_relaxed) != Missing::kNothing; }
  bool is_given_back() const { return missing_.load(std::memory_order_relaxed) == Missing::kMemory; }
  bool is_unseen() const { return missing_.load(std::memory_order_relaxed) == Missing::kSight; }
  // Lets waiters see the end. After this the operation may vanish at any moment.
  void end();
  // Makes a complete operation pending again.
  void restart();

  // Notes that the caller waits no longer.
  void give_up() { is_given_up_.store(true, std::memory_order_relaxed); }
  bool is_given_up() const { return is_given_up_.load(std::memory_order_relaxed); }

  // Waits until the operation is done, and returns false at the deadline. The caller works for the loop as long as that
  // is of use.
  bool wait(const Deadline& deadline) const;
  // Waits without looking at the clock. May return early, with false.
  bool wait_briefly(int milliseconds) const;
  // Returns an eventfd that is readable once the operation is done, for event loops. It is made at first use.
  int descriptor();
  // Closes it, where the operation is over and nobody waits by it any more. The operation itself may live on for a
  // while, as loops look only now and then which ones are over.
  void close_descriptor();

  // This is the lock of the one loop that works on the operation, or null when several do. It is set before the
  // operation is submitted.
  std::shared_ptr<transport::ProgressLock> progress;

 private:
  enum class State : std::uint32_t {
    kPending,
    kFailing,
    kComplete,
    kCompleteAnyway,  // all answers came, although it was failing
    kFailed,
  };
  enum class Missing : std::uint8_t { kNothing, kAnswer, kMemory, kSight };
  static constexpr bool is_end(State state) { return state >= State::kComplete; }
  bool settle();

  std::atomic<State> state_{State::kPending};
  std::atomic<Missing> missing_{Missing::kNothing};
  std::atomic<bool> is_given_up_{false};
  std::atomic<bool> is_over_{false};  // true: over; the last thing that a loop writes to an operation
  mutable std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<int> descriptor_{-1};
};

}  // namespace bps::worker
