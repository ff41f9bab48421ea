// SPDX-License-Identifier: Apache-2.0
// Defines monotonic time and deadlines. Every wait of the library takes a Deadline.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace bps {

using Clock = std::chrono::steady_clock;
using Duration = std::chrono::nanoseconds;

// A longer time counts as this one, which any time of the clock can add as nanoseconds. A negative time is zero.
inline constexpr double kForever_s = 1e9;
inline Duration to_duration(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, kForever_s)));
}

class Deadline {
 public:
  // An infinite time, or one of more than thirty years, is no deadline.
  static Deadline after(double seconds) { return after(seconds, Clock::now()); }
  static Deadline after(double seconds, Clock::time_point now) {
    return seconds < kForever_s ? Deadline(now + to_duration(seconds)) : never();
  }
  static Deadline never() { return Deadline(Clock::time_point::max()); }
  bool passed() const { return Clock::now() >= at_; }
  // Returns the time left, never negative, in whole milliseconds rounded up (what poll(2) takes).
  int left_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
  }
  Clock::time_point at() const { return at_; }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

inline std::uint64_t to_ns(Clock::time_point time) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<Duration>(time.time_since_epoch()).count());
}
inline std::uint64_t now_ns() {
  return to_ns(Clock::now());
}

// Returns that clock's last tick, some milliseconds ago at most. It costs a load from memory, and no look at a timer.
inline std::uint64_t coarse_now_ns() {
  timespec now{};
  (void)::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace bps
