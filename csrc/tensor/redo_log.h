// SPDX-License-Identifier: Apache-2.0
// Keeps what a server is about to write over the inputs of a sum, in memory that outlives the server.
//
// A server sums in place, block by block, in memory that it shares with the ranks of its host. If it ends in the
// middle, the blocks before are results, in the memory of every rank, and those behind are inputs. Some ranks may have
// a part of the block between. Its result is here, and each rank copies it. So no rank needs another one, or a copy of
// its input: BPS_SERVER_FAILOVER.
//
// The writer calls begin(), fills the block, calls publish(), and only then writes to the ranks. The reader reads only
// once the writer can write no more, or has said that the round has failed. It checks everything that it reads: the
// writer is a member of the job, and may lie.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "core/trace.h"

namespace bps::tensor {

class RedoLog {
 public:
  static constexpr std::uint64_t kBlock = 128 * 1024;  // is the most that one has

  // `memory` is shared, zeroed when it is new, and aligned as pages are; the log does not own it.
  explicit RedoLog(std::span<std::byte> memory) : entries_(reinterpret_cast<Entry*>(memory.data())) {}
  static constexpr std::size_t bytes() { return 2 * sizeof(Entry); }

  // Returns where the next block of a partition goes. The one before must have been written to all ranks.
  std::byte* begin() {
    Entry& entry = entries_[(sequence_ + 1) % 2];
    entry.sequence.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return entry.block;
  }
  // Says that the block is here: `size` bytes at `at` of the partition. Writes to the ranks come after this.
  void publish(const TraceKey& key, std::uint64_t at, std::uint64_t size) {
    Entry& entry = entries_[++sequence_ % 2];
    entry.group = key.group;
    entry.tensor = key.tensor;
    entry.round = key.round;
    entry.partition = key.partition;
    entry.at = at;
    entry.size = size;
    entry.sequence.store(sequence_, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

  struct Last {
    std::uint64_t at;
    std::span<const std::byte> block;
    std::uint64_t end() const { return at + block.size(); }
  };
  // Returns the last block, if it is of this partition. All before it are written to all ranks, and none behind.
  std::optional<Last> last_of(const TraceKey& key, std::uint64_t length) const {
    const std::uint64_t first = entries_[0].sequence.load(std::memory_order_acquire);
    const std::uint64_t second = entries_[1].sequence.load(std::memory_order_acquire);
    if (first == second) return std::nullopt;  // nothing was ever written
    const Entry& entry = entries_[first > second ? 0 : 1];
    const std::uint64_t at = entry.at;
    const std::uint64_t size = entry.size;
    const bool is_it = entry.group == key.group && entry.tensor == key.tensor && entry.round == key.round &&
                       entry.partition == key.partition;
    // A writer that goes on with another partition may have changed one field and not yet the next.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.sequence.load(std::memory_order_relaxed) != std::max(first, second)) return std::nullopt;
    if (!is_it || size > kBlock || at > length || size > length - at) return std::nullopt;
    return Last{at, {entry.block, static_cast<std::size_t>(size)}};
  }

 private:
  struct Entry {
    alignas(64) std::atomic<std::uint64_t> sequence;  // 0: not valid
    std::uint32_t group, tensor, round, partition;
    std::uint64_t at, size;
    alignas(64) std::byte block[kBlock];
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "the log is shared between processes");

  Entry* entries_;
  std::uint64_t sequence_ = 0;  // belongs to the writer
};

}  // namespace bps::tensor
