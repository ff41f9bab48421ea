// SPDX-License-Identifier: Apache-2.0
// Counts the partitions under way to a server, and their bytes, and notes since when it has answered none. Belongs to
// the loop's thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/clock.h"

namespace bps::worker {

class Outstanding {
 public:
  // A partition that is cancelled before it was sent counts with no bytes.
  std::size_t partitions() const { return partitions_; }
  std::uint64_t bytes() const { return bytes_; }

  void note_sent(std::uint64_t bytes) {
    bytes_ += bytes;
    ++partitions_;
  }
  // Takes back a partition that was not sent after all.
  void take_back(std::uint64_t bytes) {
    bytes_ -= bytes;
    --partitions_;
  }
  void note_answered(std::uint64_t bytes) {
    take_back(bytes);
    has_answered_ = true;
  }
  // Makes room for others when the answer of an operation in two phases is here: its bytes are no longer under way. The
  // partition still is, until note_answered() follows with no bytes.
  void note_landed(std::uint64_t bytes) {
    bytes_ -= bytes;
    has_answered_ = true;
  }

  // Looks at the clock, and returns true when nothing has been answered for a while. Ranks may then be waiting for each
  // other in a deadlock, and the limits of this side (scheduling credit, staging buffers) yield by one partition. Only
  // a sender that is held up asks.
  bool check_stall() {
    const auto now = Clock::now();
    if (std::exchange(has_answered_, false)) last_answer_ = now;
    return now - last_answer_ > kStall;
  }
  void restart_stall() { has_answered_ = true; }

 private:
  static constexpr auto kStall = std::chrono::milliseconds(2);

  std::uint64_t bytes_ = 0;
  std::size_t partitions_ = 0;
  bool has_answered_ = true;  // since check_stall() was asked last
  Clock::time_point last_answer_{};
};

}  // namespace bps::worker
