// SPDX-License-Identifier: Apache-2.0
// The last operations of a worker, for people: always kept, in a ring that newer ones overwrite.
//
// Threading: an operation is noted by the thread that starts it and by the one that ends it; any thread may list them.
// No lock, and nothing is allocated: an entry is a few relaxed stores. One that is overwritten while it is read, or
// ended, is recognised by its sequence number and left out.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/clock.h"
#include "tensor/placement.h"

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
    std::atomic<End> end{End::kNone};
    std::atomic<Clock::rep> began{0};
    std::atomic<Clock::rep> ended{0};
  };

  // What a list shows of one.
  struct Record {
    std::uint64_t sequence;
    const Tensor* tensor;
    tensor::OperationKind kind;
    std::uint32_t round;
    End end;
    std::int64_t age_ms;       // since it began
    std::int64_t duration_us;  // -1: it has not ended
  };

  Entry& begin(std::uint64_t sequence, const Tensor& tensor, tensor::OperationKind kind, std::uint32_t round,
               Clock::time_point now) {
    Entry& entry = ring_[sequence % kEntries];
    entry.sequence.store(kUnused, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    entry.tensor.store(&tensor, std::memory_order_relaxed);
    entry.kind.store(kind, std::memory_order_relaxed);
    entry.round.store(round, std::memory_order_relaxed);
    entry.end.store(End::kNone, std::memory_order_relaxed);
    entry.began.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    entry.sequence.store(sequence, std::memory_order_release);
    return entry;
  }

  static void end(Entry& entry, std::uint64_t sequence, End how) {
    if (entry.sequence.load(std::memory_order_relaxed) != sequence) return;
    entry.ended.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    entry.end.store(how, std::memory_order_release);
  }

  // The newest ones, oldest first.
  std::vector<Record> list(std::size_t most) const;

 private:
  static constexpr std::size_t kEntries = 256;
  static constexpr std::uint64_t kUnused = ~0ULL;

  std::array<Entry, kEntries> ring_;
};

}  // namespace bps::worker
