// SPDX-License-Identifier: Apache-2.0
// Monotonic time and deadlines. Every wait of the library takes a Deadline.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace bps {

using Clock = std::chrono::steady_clock;
using Duration = std::chrono::nanoseconds;

class Deadline {
 public:
  static Deadline after(double seconds) {
    return Deadline(Clock::now() + std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
  }
  bool passed() const { return Clock::now() >= at_; }
  // Time left, never negative, in whole milliseconds rounded up (what poll(2) takes).
  int left_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
  }
  Clock::time_point at() const { return at_; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<Duration>(Clock::now().time_since_epoch()).count());
}

}  // namespace bps
