// SPDX-License-Identifier: Apache-2.0
// Keeps the servers of an operation in step, so that all links are busy to its end: partitions go out in an order that
// has some for each server all the time (Places::plan), and only a limited number may be without an answer.
//
// Flows that share a link get equal shares of it, whatever they have to carry. Without a pace servers that sum little
// are done early, and only the links of the others are busy at the end. Every rank has the same order, whether it
// pushes to servers or to relays, so that all may send the first partition without an answer. Belongs to the loop's
// thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "core/clock.h"

namespace bps::worker {

class Pace {
 public:
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  // Returns how many partitions of so many bytes may be under way to each server, on average. Partitions are small
  // where links are slow (BPS_PARTITION_BYTES): then some travel while others are summed. The more there are, the
  // longer half of the links are idle at the end; the fewer bytes they have, the longer links that are far wait for
  // answers.
  static constexpr std::uint64_t each_of(std::uint64_t partition_bytes) {
    constexpr std::uint64_t kFewestBytes = 128 << 10;
    const std::uint64_t needed = kFewestBytes / std::max<std::uint64_t>(partition_bytes, 1);
    return std::clamp<std::uint64_t>(std::max(partition_bytes >> 16, needed), 2, 8);
  }

  // `ahead` says how many partitions of the operation may be under way. With kNone its servers need no pace.
  void begin(std::uint64_t ahead) {
    ahead_ = ahead;
    answered_ = seen_ = 0;
    since_ = {};
    lets_others_pass_ = false;
  }
  void note_answered(std::uint32_t count) { answered_ += count; }
  // Returns true when the partition that `turn` others precede may be sent.
  bool allows(std::uint64_t turn) { return ahead_ == kNone || turn < answered_ + ahead_ || is_stalled(Clock::now()); }
  // Returns true when nothing has been answered for so long that the operation shall have no pace any more.
  bool is_stalled(Clock::time_point now) {
    if (since_ == Clock::time_point{} || seen_ != answered_) {
      seen_ = answered_;
      since_ = now;
    }
    lets_others_pass_ |= now - since_ >= kPatience;
    if (now - since_ < kStall) return false;
    ahead_ = kNone;
    return true;
  }
  // Returns true, to the operation's end, when nothing has been answered for kPatience. Ranks that start operations in
  // different orders may then wait for each other, so other operations pass this one whenever it may not go on. Where a
  // rank is merely late, they use a link that has nothing else to carry.
  bool lets_others_pass() const { return lets_others_pass_; }

 private:
  // This is longer than a partition waits in the queues of most links.
  static constexpr auto kPatience = std::chrono::milliseconds(20);
  static constexpr auto kStall = std::chrono::milliseconds(250);

  bool lets_others_pass_ = false;
  std::uint64_t ahead_ = kNone;
  std::uint64_t answered_ = 0;
  std::uint64_t seen_ = 0;  // the value of answered_ when the sender was held up last
  Clock::time_point since_{};
};

}  // namespace bps::worker
