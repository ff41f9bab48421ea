// SPDX-License-Identifier: Apache-2.0
#include "core/tick_counter.h"

#include <fstream>
#include <string>

namespace bps {

bool tick_counter_is_trusted() {
#if defined(__x86_64__)
  std::ifstream in("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string source;
  return std::getline(in, source) && source == "tsc";
#else
  return false;
#endif
}

TickSample TickSample::take() {
  TickSample best;
  std::uint64_t narrowest = ~std::uint64_t{0};
  for (int attempt = 0; attempt < 3; ++attempt) {  // the thread may be held up between the two clocks
    const std::uint64_t begin = tick_counter();
    const std::uint64_t ns = now_ns();
    const std::uint64_t width = tick_counter() - begin;
    if (width >= narrowest) continue;
    narrowest = width;
    best = {.ticks = begin + width / 2, .ns = ns};
  }
  return best;
}

void TickTimes::add(const TickSample& sample) {
  const bool goes_on = latest_ && sample.ticks > latest_->ticks && sample.ns >= latest_->ns;
  before_ = goes_on ? latest_ : std::nullopt;
  latest_ = sample;
}

std::uint64_t TickTimes::ns(std::uint64_t ticks) const {
  if (!latest_) return ticks;
  if (!before_) return latest_->ns;
  // The distance has no sign, for which the product of two such numbers leaves no room.
  __extension__ using Wide = unsigned __int128;
  const bool is_before = ticks < before_->ticks;
  const std::uint64_t distance = is_before ? before_->ticks - ticks : ticks - before_->ticks;
  const auto ns = static_cast<std::uint64_t>(Wide{distance} * Wide{latest_->ns - before_->ns} /
                                             Wide{latest_->ticks - before_->ticks});
  return is_before ? before_->ns - ns : before_->ns + ns;
}

}  // namespace bps
