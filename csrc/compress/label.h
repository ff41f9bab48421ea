// SPDX-License-Identifier: Apache-2.0
// The label is the 128 bytes in front of a compressed payload: the text of the tensor's declaration (compression.h),
// filled up with zeros. So a server learns from each push how to read it, and needs no table of tensors.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "compress/random.h"

namespace bps::compress {

inline constexpr std::size_t kLabelBytes = 128;
// A payload stands for at most this many times its length, unless its partition is small. So what a server does for a
// push is bounded by what it takes to send it.
inline constexpr std::uint64_t kMostRatio = 4096;
inline constexpr std::uint64_t kMostFree = 4 << 20;
inline constexpr std::size_t kMostText = kLabelBytes - 1;
constexpr bool stands_for_too_much(std::uint64_t partition, std::uint64_t payload) {
  return partition > kMostFree && partition / payload > kMostRatio;
}
using Label = std::array<std::byte, kLabelBytes>;

// `text` has at most kMostText characters.
inline Label make_label(std::string_view text) {
  Label label{};
  std::memcpy(label.data(), text.data(), std::min(text.size(), kMostText));
  return label;
}

// Returns the text, which lies in `label`. Any bytes will do.
inline std::string_view read_label(const Label& label) {
  const auto* text = reinterpret_cast<const char*>(label.data());
  return {text, ::strnlen(text, kMostText)};
}

// Returns the seed of random methods: another one for each partition, round and sender.
inline std::uint64_t seed_of(std::uint32_t tensor, std::uint32_t partition, std::uint32_t round, std::uint32_t sender) {
  std::uint64_t seed = 0;
  for (const std::uint64_t number : {tensor, partition, round, sender}) seed = random_bits(seed + number, 0);
  return seed;
}

}  // namespace bps::compress
