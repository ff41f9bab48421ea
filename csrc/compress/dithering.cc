// SPDX-License-Identifier: Apache-2.0
#include "compress/dithering.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "compress/norms.h"
#include "compress/random.h"
#include "compress/store.h"

namespace bps::compress {
namespace {

constexpr std::uint32_t kNan = 0x7fc00000;

}  // namespace

float DitheringCodec::norm_of(std::span<const float> values) const {
  float norm = 0;
  if (l2_) {
    norm = static_cast<float>(std::sqrt(sum_of_squares(values)));
  } else {
    std::uint32_t largest = 0;  // as bits, so that a NaN is the largest
    for (const float value : values) largest = std::max(largest, std::bit_cast<std::uint32_t>(value) & 0x7fffffff);
    norm = std::bit_cast<float>(largest);
  }
  return std::isfinite(norm) ? norm : std::bit_cast<float>(kNan);
}

float DitheringCodec::value_of(std::uint32_t level) const {
  if (!natural_) return static_cast<float>(level) / static_cast<float>(levels_);
  return level == 0 ? 0.0F : std::ldexp(1.0F, static_cast<int>(level) - static_cast<int>(levels_));
}

std::uint32_t DitheringCodec::below(float share) const {
  if (!natural_) {
    return std::min(static_cast<std::uint32_t>(share * static_cast<float>(levels_)), levels_ - 1);
  }
  // The exponent of the share is that of its level; 1 itself is between the two highest.
  const int exponent = static_cast<int>(std::bit_cast<std::uint32_t>(share) >> 23) - 127;
  return static_cast<std::uint32_t>(std::clamp(exponent + static_cast<int>(levels_), 0, static_cast<int>(levels_) - 1));
}

void DitheringCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const {
  if (from.empty()) return;
  const float norm = norm_of(from);
  store(norm, to.data());
  std::byte* codes = to.data() + sizeof norm;
  std::fill_n(codes, to.size() - sizeof norm, std::byte{0});
  if (!(norm > 0)) return;
  std::array<float, 128> values{};
  for (std::uint32_t level = 0; level <= levels_; ++level) values[level] = value_of(level);
  const unsigned per_byte = 8 / bits_;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const float share = std::min(std::fabs(from[i]) / norm, 1.0F);
    std::uint32_t level = below(share);
    const float chance = (share - values[level]) / (values[level + 1] - values[level]);
    if (random_unit(seed, i) < chance) ++level;
    if (from[i] < 0) level |= 1U << (bits_ - 1);
    codes[i / per_byte] |= static_cast<std::byte>(level << i % per_byte * bits_);
  }
}

Decoded DitheringCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  if (to.empty()) return Decoded::kOk;
  const auto norm = load<float>(from.data());
  const auto norm_bits = std::bit_cast<std::uint32_t>(norm);
  if (norm_bits != kNan && norm_bits >= 0x7f800000) return Decoded::kMalformed;
  const std::byte* codes = from.data() + sizeof norm;
  const unsigned per_byte = 8 / bits_;
  const std::uint32_t mask = (1U << bits_) - 1;
  const auto code_of = [&](std::size_t i) {
    return static_cast<std::uint32_t>(codes[i / per_byte]) >> i % per_byte * bits_ & mask;
  };
  // By code, which is a level and a sign.
  std::array<float, 256> values{};
  for (std::uint32_t level = 0; level <= levels_; ++level) {
    values[level] = norm * value_of(level);
    values[level | 1U << (bits_ - 1)] = -values[level];
  }
  const std::size_t room = (from.size() - sizeof norm) * per_byte;
  for (std::size_t i = 0; i < room; ++i) {
    const std::uint32_t code = code_of(i);
    if ((code & mask >> 1) > levels_ || (i >= to.size() && code != 0)) return Decoded::kMalformed;
  }
  choose(into, [&]<Into kInto>() {
    for (std::size_t i = 0; i < to.size(); ++i) put<kInto>(values[code_of(i)], to[i]);
  });
  return Decoded::kOk;
}

}  // namespace bps::compress
