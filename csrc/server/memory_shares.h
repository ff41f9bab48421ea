// SPDX-License-Identifier: Apache-2.0
// Bounds the memory that each rank makes a server keep between rounds, for weights and for what compression has lost.
//
// The members of a group bear what the group needs in equal parts, so that all ranks together may use all of it, and
// one rank alone, in a group of its own, no more than its part. One thread uses it. take() may throw std::bad_alloc,
// before anything is taken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>

namespace bps::server {

class MemoryShares {
 public:
  // `most` is the bytes of each rank.
  explicit MemoryShares(std::uint64_t most) : most_(most) {}

  // Returns false, and takes nothing, where one of the ranks has no room for its part.
  bool take(std::span<const std::uint32_t> ranks, std::uint64_t bytes) {
    const std::uint64_t part = part_of(ranks, bytes);
    for (const std::uint32_t rank : ranks) {
      const std::uint64_t used = used_[rank];
      if (part > most_ || used > most_ - part) return false;
    }
    for (const std::uint32_t rank : ranks) used_[rank] += part;
    return true;
  }
  void give_back(std::span<const std::uint32_t> ranks, std::uint64_t bytes) {
    for (const std::uint32_t rank : ranks) used_[rank] -= part_of(ranks, bytes);
  }

 private:
  // The tables and the allocator add so much to each partition. It is counted, so that small ones are not free.
  static constexpr std::uint64_t kOverhead = 512;
  static std::uint64_t part_of(std::span<const std::uint32_t> ranks, std::uint64_t bytes) {
    return (bytes + kOverhead) / std::max<std::size_t>(ranks.size(), 1);
  }

  const std::uint64_t most_;
  std::unordered_map<std::uint32_t, std::uint64_t> used_;
};

}  // namespace bps::server
