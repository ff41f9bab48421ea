// SPDX-License-Identifier: Apache-2.0
// How tests wait: for a condition, never for a time.
#pragma once

#include <chrono>
#include <thread>

#include "core/clock.h"

namespace bps {

inline constexpr Duration kAtOnce = Duration::zero();  // for a condition that makes progress itself

// Asks until it is so, and whether it has become so within these seconds. It is asked once more after them.
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
