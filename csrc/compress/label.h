// SPDX-License-Identifier: Apache-2.0
// The 64 bytes in front of a compressed payload: the text that the tensor was declared with (compression.h), filled up
// with zeros. So a server learns with each push how to read it, and keeps no table of tensors.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace bps::compress {

inline constexpr std::size_t kLabelBytes = 64;
inline constexpr std::size_t kMostText = kLabelBytes - 1;
using Label = std::array<std::byte, kLabelBytes>;

// `text` has at most kMostText characters.
inline Label make_label(std::string_view text) {
  Label label{};
  std::memcpy(label.data(), text.data(), std::min(text.size(), kMostText));
  return label;
}

// The text, which lies in `label`. Any bytes will do.
inline std::string_view read_label(const Label& label) {
  const auto* text = reinterpret_cast<const char*>(label.data());
  return {text, ::strnlen(text, kMostText)};
}

// What random methods draw from: of each partition in each round, another one for each sender. Mixed as SplitMix64 does
// (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), once per number.
inline std::uint64_t seed_of(std::uint32_t tensor, std::uint32_t partition, std::uint32_t round, std::uint32_t sender) {
  std::uint64_t seed = 0;
  for (const std::uint64_t number : {tensor, partition, round, sender}) {
    seed += number + 0x9e3779b97f4a7c15;
    seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9;
    seed = (seed ^ (seed >> 27)) * 0x94d049bb133111eb;
    seed ^= seed >> 31;
  }
  return seed;
}

}  // namespace bps::compress
