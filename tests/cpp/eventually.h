// SPDX-License-Identifier: Apache-2.0
// Lets tests wait for a condition, never for a time.
#pragma once

#include <chrono>
#include <thread>

#include "core/clock.h"

namespace bps {

inline constexpr Duration kAtOnce = Duration::zero();  // is for a condition that makes progress itself

// Asks again and again, at most for so many seconds and once more after them. Returns true when the condition holds.
template <typename Condition>
[[nodiscard]] bool eventually(Condition&& condition, double within = 30,
                              Duration pause = std::chrono::milliseconds(1)) {
  const Deadline deadline = Deadline::after(within);
  for (;;) {
    const bool is_last = deadline.passed();
    if (condition()) return true;
    if (is_last) return false;
    if (pause > kAtOnce) std::this_thread::sleep_for(pause);
  }
}

}  // namespace bps
