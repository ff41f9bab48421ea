// SPDX-License-Identifier: Apache-2.0
// Reads the processor's own counter, which takes a third of the time of a look at the clock, and turns it to now_ns().
//
#pragma once

#include <cstdint>
#include <optional>

#include "core/clock.h"
#include "core/codec.h"

namespace bps {

// Returns true when the kernel keeps its time by that counter: it then runs evenly, and the same on all processors.
bool tick_counter_is_trusted();

inline std::uint64_t tick_counter() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();  // avoids x86intrin.h, which takes half a second to read
#else
  return now_ns();
#endif
}

// Holds a reading of the counter and of the clock at the same moment.
struct TickSample {
  std::uint64_t ticks = 0;
  std::uint64_t ns = 0;

  static TickSample take();
  static constexpr void fields(auto& io, auto& m) { io(m.ticks, m.ns); }
};
static_assert(codec::Plain<TickSample>);

// Turns ticks into nanoseconds, between the latest two samples; before the first one ticks are nanoseconds. A counter
// that goes backwards has begun anew, as the machine slept.
class TickTimes {
 public:
  void add(const TickSample& sample);
  std::uint64_t ns(std::uint64_t ticks) const;

 private:
  std::optional<TickSample> before_;
  std::optional<TickSample> latest_;
};

}  // namespace bps
