// SPDX-License-Identifier: Apache-2.0
// Counts durations. As with a Counter, one thread writes, any thread reads, and an observation is a plain add.
//
// Bounds are powers of two from 32 us to 134 s: from the shortest operation to the longest that a person waits for.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/clock.h"
#include "core/counter.h"

namespace bps {

class DurationHistogram {
 public:
  static constexpr std::size_t kBounds = 23;
  static constexpr unsigned kFirst_log2_us = 5;
  static constexpr double bound_s(std::size_t i) { return static_cast<double>(1ULL << (i + kFirst_log2_us)) * 1e-6; }

  void observe(Duration time) {
    const auto ns = static_cast<std::uint64_t>(time.count() < 0 ? 0 : time.count());
    // A time of exactly the bound belongs below it.
    const auto log2_us = static_cast<unsigned>(std::bit_width(ns == 0 ? 0 : (ns - 1) / 1000));
    const unsigned bound = log2_us <= kFirst_log2_us ? 0 : log2_us - kFirst_log2_us;
    counts_[bound < kBounds ? bound : kBounds].add();
    sum_ns_.add(ns);
  }

  // Returns the number of durations up to bound i, and above the one before; for kBounds, of those above all bounds.
  std::uint64_t count(std::size_t i) const { return counts_[i].get(); }
  std::uint64_t sum_ns() const { return sum_ns_.get(); }

 private:
  std::array<Counter, kBounds + 1> counts_;
  Counter sum_ns_;
};

}  // namespace bps
