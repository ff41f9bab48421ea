// SPDX-License-Identifier: Apache-2.0
// Time in a simulation: it stands still until the next event.
//
// The core asks std::chrono::steady_clock, and the simulator defines that clock's now(): what is simulated are the very
// objects that users get, without a line that is there for tests.
#pragma once

#include "core/clock.h"

namespace bps::sim {

using Time = Clock::time_point;

void set_time(Time now);

}  // namespace bps::sim
