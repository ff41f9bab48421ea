// SPDX-License-Identifier: Apache-2.0
// Records the last rounds of a server loop that are over, for people, in a ring that newer ones overwrite. It is always
// on.
//
// note() belongs to the loop's thread. Any thread may list the rounds, also while the loop hangs. There is no lock, and
// nothing is allocated: an entry is one cache line. An entry that is overwritten while it is read is recognised by its
// sequence number and left out. Times are as coarse as the kernel's clock ticks (some milliseconds), which costs less
// than to read the exact time.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/round.h"

namespace bps::server {

class RoundRecorder {
 public:
  struct Record {
    RoundKey key;
    std::uint32_t number = 0;
    std::uint32_t last_rank = 0;  // the rank whose push came last
    bool failed = false;
    std::uint64_t bytes = 0;
    std::uint64_t opened = 0;  // coarse_now_ns()
    std::uint64_t summed = 0;  // 0: it was not summed
    std::uint64_t ended = 0;   // every member had its answer
  };

  // Notes a round that is over.
  void note(const Round& round, std::uint64_t now) {
    Entry& entry = ring_[next_ % kEntries];
    constexpr auto kRelaxed = std::memory_order_relaxed;
    entry.sequence.store(kBusy, kRelaxed);
    std::atomic_thread_fence(std::memory_order_release);
    entry.group_and_tensor.store(std::uint64_t{round.key.group} << 32 | round.key.tensor, kRelaxed);
    entry.partition_and_number.store(std::uint64_t{round.key.partition} << 32 | round.number, kRelaxed);
    const std::uint64_t flags = (round.is(RoundPhase::kFailed) ? kFailed : 0) | (round.key.for_host ? kForHost : 0);
    entry.rank_and_flags.store(std::uint64_t{round.history.last_rank} << 32 | flags, kRelaxed);
    entry.bytes.store(round.first.length, kRelaxed);
    entry.opened.store(round.history.opened, kRelaxed);
    entry.summed.store(round.history.summed_at, kRelaxed);
    entry.ended.store(now, kRelaxed);
    entry.sequence.store(next_++, std::memory_order_release);
  }

  // Lists all that are kept, oldest first.
  std::vector<Record> list() const;

 private:
  static constexpr std::size_t kEntries = 128;
  static constexpr std::uint64_t kUnused = ~0ULL;
  static constexpr std::uint64_t kBusy = ~1ULL;
  static constexpr std::uint64_t kFailed = 1;
  static constexpr std::uint64_t kForHost = 2;

  struct alignas(64) Entry {
    std::atomic<std::uint64_t> sequence{kUnused};
    std::atomic<std::uint64_t> group_and_tensor{0};
    std::atomic<std::uint64_t> partition_and_number{0};
    std::atomic<std::uint64_t> rank_and_flags{0};
    std::atomic<std::uint64_t> bytes{0};
    std::atomic<std::uint64_t> opened{0};
    std::atomic<std::uint64_t> summed{0};
    std::atomic<std::uint64_t> ended{0};
  };

  std::array<Entry, kEntries> ring_;
  std::uint64_t next_ = 0;
};

}  // namespace bps::server
