// SPDX-License-Identifier: Apache-2.0
// The state of an operation, and the waits for its end.
//
//   kPending ──► kFailing ──► kFailed
//     ▲  │           └──────► kCompleteAnyway
//     │  └──────────────────► kComplete
//     └─────── restart() ─────────┘
//
// docs/notes/operations.md has a sentence for each transition. Threading: any thread; the state is a futex, on which
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

  // Done: the caller has its memory again, and its thread may return.
  bool is_done() const { return is_end(state_.load(std::memory_order_acquire)); }
  // Something has failed, and what is left of the operation is being cancelled.
  bool is_failing() const { return state_.load(std::memory_order_acquire) == State::kFailing; }
  bool has_failed() const { return state_.load(std::memory_order_acquire) == State::kFailed; }
  // Over: no worker loop touches the operation any more, so that it may be used again or vanish.
  bool is_over() const { return is_over_.load(std::memory_order_acquire); }
  // It may be made pending again: no loop has been told to cancel it.
  bool is_reusable() const;

  // False when it is failing already, or done.
  bool begin_failing();
  // A partition has ended without its answer. An operation whose answers all came is complete even if it was failing.
  void mark_incomplete();
  // Its result went to pages that the process has given back meanwhile. So it fails when it is over, on this rank only.
  void mark_given_back() { missing_.store(Missing::kMemory, std::memory_order_relaxed); }
  bool is_incomplete() const { return missing_.load(std::memory_order_relaxed) != Missing::kNothing; }
  bool is_given_back() const { return missing_.load(std::memory_order_relaxed) == Missing::kMemory; }
  // Lets waiters see the end. After this the operation may vanish at any moment.
  void end();
  // Makes a complete operation pending again.
  void restart();

  // The caller waits no longer.
  void give_up() { is_given_up_.store(true, std::memory_order_relaxed); }
  bool is_given_up() const { return is_given_up_.load(std::memory_order_relaxed); }

  // Waits until done or the deadline; false at the deadline. Works in the loop's stead as long as that is of use.
  bool wait(const Deadline& deadline) const;
  // The same without looking at the clock; may return early, with false.
  bool wait_briefly(int milliseconds) const;
  // Readable (eventfd) once done, for event loops; made at first use.
  int descriptor();

  // The lock of the one loop that works on the operation; null when there are several. It is set before the operation
  // is submitted.
  std::shared_ptr<transport::ProgressLock> progress;

 private:
  enum class State : std::uint32_t {
    kPending,
    kFailing,
    kComplete,
    kCompleteAnyway,  // all answers came, although it was failing
    kFailed,
  };
  enum class Missing : std::uint8_t { kNothing, kAnswer, kMemory };
  static constexpr bool is_end(State state) { return state >= State::kComplete; }
  bool settle();

  std::atomic<State> state_{State::kPending};
  std::atomic<Missing> missing_{Missing::kNothing};
  std::atomic<bool> is_given_up_{false};
  std::atomic<bool> is_over_{false};  // the last thing that a loop writes to an operation
  mutable std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<int> descriptor_{-1};
};

}  // namespace bps::worker
