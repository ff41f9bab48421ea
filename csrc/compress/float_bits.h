// SPDX-License-Identifier: Apache-2.0
// Treats float32 as bits: magnitudes are ordered as integers are, and NaN is above infinity.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

namespace bps::compress {

inline constexpr std::uint32_t kInfinity = 0x7f800000;
inline constexpr std::uint32_t kNan = 0x7fc00000;  // the one that is sent

// Adding it to a magnitude below 2^22 rounds to an integer, which is then in the low bits, in two's complement.
inline constexpr float kRound = 0x1.8p23F;

inline std::uint32_t magnitude(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffff;
}

inline std::uint32_t largest_magnitude(std::span<const float> values) {
  std::uint32_t largest = 0;
  for (const float value : values) largest = std::max(largest, magnitude(value));
  return largest;
}

inline bool finite(float value) {
  return magnitude(value) < kInfinity;
}

inline bool all_finite(std::span<const float> values) {
  return largest_magnitude(values) < kInfinity;
}

}  // namespace bps::compress
