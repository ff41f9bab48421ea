// SPDX-License-Identifier: Apache-2.0
// What a seed decides. The same on every machine, which the distributions of the standard library are not.
#pragma once

#include <cstdint>

#include "core/clock.h"

namespace bps::sim {

// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15); }
  std::uint64_t below(std::uint64_t n) { return next() % n; }
  bool chance(double p) { return static_cast<double>(next() >> 11) * 0x1p-53 < p; }
  // More often short than long.
  Duration between(Duration least, Duration most) {
    const double unit = static_cast<double>(next() >> 11) * 0x1p-53;
    return least + Duration(static_cast<std::int64_t>(static_cast<double>((most - least).count()) * unit * unit));
  }
  template <typename T, std::size_t n>
  const T& one_of(const T (&choices)[n]) {
    return choices[below(n)];
  }

 private:
  std::uint64_t state_;
};

}  // namespace bps::sim
