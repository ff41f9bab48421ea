// SPDX-License-Identifier: Apache-2.0
// Keeps the servers of an operation in step, so that all links are busy to its end: each has as much under way as its
// part of the operation, and none is far ahead of the others.
//
// Flows that share a link get equal shares of it, whatever they have to carry. Without a pace servers that sum little
// are done early, and only the links of the others are busy at the end. Threading: the loop's.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "core/clock.h"

namespace bps::worker {

class Pace {
 public:
  // How many partitions may be under way to each server, on average, where they have at most so many bytes. Partitions
  // are small where links are slow (BPS_PARTITION_BYTES): then one travels while another one is summed. The more there
  // are, the longer half of the links are idle at the end.
  static constexpr std::uint64_t each_of(std::uint64_t partition_bytes) {
    return std::clamp<std::uint64_t>(partition_bytes >> 16, 2, 8);
  }

  // `parts`: partitions of the operation on all servers over a network, of which `ahead` may be under way. 0 parts: the
  // servers need no pace.
  void begin(std::uint64_t parts, std::uint64_t ahead) {
    parts_ = parts;
    ahead_ = ahead;
    answered_ = seen_ = 0;
    since_ = {};
  }
  void note_answered(std::uint32_t count) { answered_ += count; }
  // True when a server that has been sent `sent` of its `size` partitions may be sent another one.
  bool allows(std::uint64_t sent, std::uint64_t size) {
    return sent * parts_ < (answered_ + ahead_) * size || parts_ == 0 || is_stalled(Clock::now());
  }
  // True when nothing has been answered for a while: ranks that start operations in different orders may wait for each
  // other. The operation then has no pace any more.
  bool is_stalled(Clock::time_point now) {
    if (since_ == Clock::time_point{} || seen_ != answered_) {
      seen_ = answered_;
      since_ = now;
    }
    if (now - since_ < kStall) return false;
    parts_ = 0;
    return true;
  }

 private:
  static constexpr auto kStall = std::chrono::milliseconds(250);

  std::uint64_t parts_ = 0;
  std::uint64_t ahead_ = 0;
  std::uint64_t answered_ = 0;
  std::uint64_t seen_ = 0;  // answered, when the sender was held up last
  Clock::time_point since_{};
};

}  // namespace bps::worker
