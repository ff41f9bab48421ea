// SPDX-License-Identifier: Apache-2.0
#include "virtual_clock.h"

namespace {

std::chrono::steady_clock::time_point now_{};

}  // namespace

// In the place of libstdc++'s: what an executable defines counts before what a shared library does.
std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
  return now_;
}

namespace bps::sim {

void set_time(Time now) {
  now_ = now;
}

}  // namespace bps::sim
