// SPDX-License-Identifier: Apache-2.0
// Bounds what one peer makes a loop do before others have their turn, in messages, in bytes, and in the time that their
// handling takes. A reader stops when the budget of a peer is used up, and goes on in the loop's next turn, after the
// timers, heartbeats among them, and after what other peers have sent.
//
// The limits are far beyond what a peer that behaves has to say at one time. Not for the data path: it reads the clock.
#pragma once

#include <cstdint>

#include "core/clock.h"

namespace bps {

class TurnBudget {
 public:
  static constexpr std::uint32_t kMessages = 64;
  static constexpr std::uint64_t kBytes = 256 << 10;
  static constexpr Duration kTime = std::chrono::milliseconds(2);

  // Counts a message of this many bytes as handled. Returns true when another one may be handled in this turn.
  bool spend(std::uint64_t bytes) {
    messages_ += 1;
    bytes_ += bytes;
    return messages_ < kMessages && bytes_ < kBytes && Clock::now() - begun_ < kTime;
  }

 private:
  const Clock::time_point begun_ = Clock::now();
  std::uint32_t messages_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace bps
