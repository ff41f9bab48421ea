// SPDX-License-Identifier: Apache-2.0
// What becomes of calls that the end of a view has interrupted, where servers may be lost unseen: the ranks tell each
// other at the beginning of the next view, and each follows from that what all do. It is bps_rdma/failover.py, for
// names of which each rank has one call under way at most.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace bps::sim {

inline constexpr std::uint32_t kMostPartitions = 16;

// Of one rank and tensor. Rounds are counted over views.
struct Report {
  std::uint32_t since = 0;                   // the first view from which on the rank can go on
  std::uint32_t next = 0;                    // the first round that it has not begun
  std::uint32_t interrupted = 0;             // the round of its call that was interrupted, plus 1; 0: none was
  std::uint32_t missing = 0;                 // the partitions of that call whose result it wants and lacks, bit by bit,
  std::uint32_t whole = 0;                   // and has
  std::uint32_t have[kMostPartitions] = {};  // bytes of what it lacks a part of
  std::uint32_t is_late = 0;                 // 1: the deadline of that call has passed
  std::uint32_t failed[4] = {};              // the last rounds that have failed on all ranks, plus 1
};

struct Decision {
  enum class Fate : std::uint8_t {
    kAgain,     // some rank has not begun it: the others start it once more
    kRepeated,  // these partitions of it, if any, are summed again
    kFailed,    // the deadline of some rank has passed
    kAborted,   // some rank has completed it, which cannot be
  } fate{};
  std::vector<std::uint32_t> partitions;
  // What some rank lacks of a partition and another one has.
  struct Gift {
    std::uint32_t partition;
    std::uint32_t rank;
    std::optional<std::uint32_t> bytes;  // all of it, and it is not summed again
  };
  std::vector<Gift> gifts;
};

// `reports`: of all ranks about one tensor.
bool can_go_on(std::span<const Report> reports, std::uint32_t epoch);
std::uint32_t first_round(std::span<const Report> reports);
Decision decide(std::span<const Report> reports, std::uint32_t round);

}  // namespace bps::sim
