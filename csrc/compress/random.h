// SPDX-License-Identifier: Apache-2.0
// Computes the random numbers of codecs: number i of a seed, in any order, without state. It is output i of SplitMix64
// (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), started with the seed.
#pragma once

#include <cstdint>

namespace bps::compress {

inline std::uint64_t random_bits(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t bits = seed + (i + 1) * 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

// Returns a number in [0, 1), a multiple of 2^-24.
inline float random_unit(std::uint64_t seed, std::uint64_t i) {
  return static_cast<float>(random_bits(seed, i) >> 40) * 0x1p-24F;
}

}  // namespace bps::compress
