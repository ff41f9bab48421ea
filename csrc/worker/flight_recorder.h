// SPDX-License-Identifier: Apache-2.0
// Records the last operations of a worker, for people, in a ring that newer ones overwrite. It is always on.
//
// Threading: an operation is noted by the thread that starts it and by the one that ends it; any thread may list them.
// There is no lock, and nothing is allocated: an entry is a few stores. A thread may be stopped in the middle of an
// entry for any time. A thread that meets such an entry leaves it alone, and an end counts only for the operation that
// it belongs to. An entry that is overwritten while it is read is recognised by its sequence number and left out.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "core/clock.h"
#include "tensor/extent.h"

namespace bps::worker {

struct Tensor;

class FlightRecorder {
 public:
  enum class End : std::uint8_t { kNone, kDone, kFailed };

  struct Entry {
    std::atomic<std::uint64_t> sequence{kUnused};
    std::atomic<const Tensor*> tensor{nullptr};  // lives as long as the worker
    std::atomic<tensor::OperationKind> kind{};
    std::atomic<std::uint32_t> round{0};
    std::atomic<Clock::rep> began{0};
    std::atomic<std::uint64_t> outcome{0};  // see outcome_of()
  };

  // Describes one operation, as a list shows it.
  struct Record {
    std::uint64_t sequence;
    const Tensor* tensor;
    tensor::OperationKind kind;
    std::uint32_t round;
    End end;
    std::int64_t age_ms;       // since it began
    std::int64_t duration_us;  // -1: it has not ended
  };

  // Returns the entry of an operation, for end(), or null when another thread is just writing there. The operation then
  // goes unrecorded.
  Entry* begin(std::uint64_t sequence, const Tensor& tensor, tensor::OperationKind kind, std::uint32_t round,
               Clock::time_point now) {
    Entry& entry = ring_[sequence % kEntries];
    if (entry.sequence.exchange(kBusy, std::memory_order_acq_rel) == kBusy) return nullptr;
    std::atomic_thread_fence(std::memory_order_release);
    entry.tensor.store(&tensor, std::memory_order_relaxed);
    entry.kind.store(kind, std::memory_order_relaxed);
    entry.round.store(round, std::memory_order_relaxed);
    entry.began.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    entry.outcome.store(outcome_of(sequence, End::kNone, 0), std::memory_order_relaxed);
    entry.sequence.store(sequence, std::memory_order_release);
    return &entry;
  }

  // Has no effect when the entry is another operation's by now.
  static void end(Entry& entry, std::uint64_t sequence, End how, Clock::duration took) {
    const auto us = std::chrono::duration_cast<std::chrono::microseconds>(took).count();
    std::uint64_t none = outcome_of(sequence, End::kNone, 0);
    entry.outcome.compare_exchange_strong(none, outcome_of(sequence, how, static_cast<std::uint64_t>(us)),
                                          std::memory_order_relaxed);
  }

  // Holds the entry of one operation, if it has one, from begin() to end().
  class Recording {
   public:
    void begin(FlightRecorder& recorder, std::uint64_t sequence, const Tensor& tensor, tensor::OperationKind kind,
               std::uint32_t round, Clock::time_point now) {
      entry_ = recorder.begin(sequence, tensor, kind, round, now);
      began_ = now;
    }
    void end(std::uint64_t sequence, End how) {
      if (entry_ != nullptr) FlightRecorder::end(*entry_, sequence, how, Clock::now() - began_);
    }
    // Returns the time since begin(), or 0 before it.
    std::int64_t age_ms() const {
      if (began_ == Clock::time_point{}) return 0;
      return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began_).count();
    }

   private:
    Entry* entry_ = nullptr;
    Clock::time_point began_{};
  };

  // Returns the newest operations, the oldest of them first.
  std::vector<Record> list(std::size_t most) const;

 private:
  static constexpr std::size_t kEntries = 256;
  static constexpr std::uint64_t kUnused = ~0ULL;
  static constexpr std::uint64_t kBusy = ~1ULL;  // a thread is writing

  // One word says how an operation ended, how long it took, and which one it was. It has the duration in 40 bits (13
  // days), the end in 2, and 22 of the sequence number, so that an entry meets the same ones again after 10^9
  // operations.
  static constexpr unsigned kDurationBits = 40;
  static constexpr std::uint64_t kLongest = (1ULL << kDurationBits) - 1;
  static std::uint64_t outcome_of(std::uint64_t sequence, End end, std::uint64_t us) {
    return sequence / kEntries << (kDurationBits + 2) | static_cast<std::uint64_t>(end) << kDurationBits |
           std::min(us, kLongest);
  }
  static End end_of(std::uint64_t outcome) { return static_cast<End>(outcome >> kDurationBits & 3); }

  std::array<Entry, kEntries> ring_;
};

}  // namespace bps::worker
