// SPDX-License-Identifier: Apache-2.0
#include "compress/dithering.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "compress/float_bits.h"
#include "compress/norms.h"
#include "compress/random.h"
#include "compress/store.h"

namespace bps::compress {

float DitheringCodec::norm_of(std::span<const float> values) const {
  float norm = 0;
  if (l2_) {
    norm = static_cast<float>(std::sqrt(sum_of_squares(values)));
  } else {
    norm = std::bit_cast<float>(largest_magnitude(values));
  }
  return std::isfinite(norm) ? norm : std::bit_cast<float>(kNan);
}

float DitheringCodec::value_of(std::uint32_t level) const {
  if (!natural_) return static_cast<float>(level) / static_cast<float>(levels_);
  return level == 0 ? 0.0F : std::ldexp(1.0F, static_cast<int>(level) - static_cast<int>(levels_));
}

namespace {

constexpr std::size_t kAtOnce = 128;  // elements, which fill whole bytes in every width

// Calls loop.template operator()<bits>(): where it is a constant, places in a byte are shifts, and loops vectorise.
template <typename Loop>
auto choose_bits(unsigned bits, Loop loop) {
  switch (bits) {
    case 2: return loop.template operator()<2>();
    case 4: return loop.template operator()<4>();
    default: return loop.template operator()<8>();
  }
}

// The highest level that is no larger, below the highest of all.
template <bool kNatural>
std::uint32_t below(float share, std::uint32_t levels) {
  if constexpr (kNatural) {
    // The exponent of the share is that of its level; 1 itself is between the two highest.
    const int exponent = static_cast<int>(std::bit_cast<std::uint32_t>(share) >> 23) - 127;
    return static_cast<std::uint32_t>(std::clamp(exponent + static_cast<int>(levels), 0, static_cast<int>(levels) - 1));
  } else {
    return static_cast<std::uint32_t>(
        std::min(static_cast<std::int32_t>(share * static_cast<float>(levels)), static_cast<std::int32_t>(levels) - 1));
  }
}

using Levels = std::array<float, 128>;  // what each stands for, as a share of the norm

// Codes of the elements of a block, one in each byte. Loops of one step each, which vectorise.
template <bool kNatural>
void encode_block(std::span<const float> from, float norm, std::uint32_t levels, const Levels& values,
                  std::uint64_t seed, std::size_t first, std::uint8_t sign, std::uint8_t* codes) {
  std::array<float, kAtOnce> shares;
  std::array<float, kAtOnce> chances;
  std::array<float, kAtOnce> drawn;
  std::array<std::uint32_t, kAtOnce> found;
  const std::size_t count = from.size();
  for (std::size_t i = 0; i < count; ++i) shares[i] = std::min(std::fabs(from[i]) / norm, 1.0F);
  for (std::size_t i = 0; i < count; ++i) found[i] = below<kNatural>(shares[i], levels);
  for (std::size_t i = 0; i < count; ++i) {
    const float low = values[found[i]];
    chances[i] = (shares[i] - low) / (values[found[i] + 1] - low);
  }
  for (std::size_t i = 0; i < count; ++i) drawn[i] = random_unit(seed, first + i);
  for (std::size_t i = 0; i < count; ++i) {
    const auto level = static_cast<std::uint8_t>(found[i] + (drawn[i] < chances[i] ? 1 : 0));
    codes[i] = static_cast<std::uint8_t>(level | (from[i] < 0 ? sign : 0));
  }
}

template <unsigned kBits>
void pack(std::span<const std::uint8_t> codes, std::byte* to) {
  constexpr unsigned kPerByte = 8 / kBits;
  for (std::size_t at = 0; at * kPerByte < codes.size(); ++at) {
    std::uint32_t byte = 0;
    for (unsigned i = 0; i < kPerByte; ++i) byte |= std::uint32_t{codes[at * kPerByte + i]} << i * kBits;
    to[at] = static_cast<std::byte>(byte);
  }
}

template <unsigned kBits>
std::uint32_t code_at(const std::byte* codes, std::size_t i) {
  constexpr unsigned kPerByte = 8 / kBits;
  return static_cast<std::uint32_t>(codes[i / kPerByte]) >> i % kPerByte * kBits & ((1U << kBits) - 1);
}

}  // namespace

void DitheringCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const {
  if (from.empty()) return;
  const float norm = norm_of(from);
  store(norm, to.data());
  std::byte* codes = to.data() + sizeof norm;
  if (!(norm > 0)) {
    std::fill_n(codes, to.size() - sizeof norm, std::byte{0});
    return;
  }
  Levels values{};
  for (std::uint32_t level = 0; level <= levels_; ++level) values[level] = value_of(level);
  const auto sign = static_cast<std::uint8_t>(1U << (bits_ - 1));
  choose_bits(bits_, [&]<unsigned kBits>() {
    for (std::size_t begin = 0; begin < from.size(); begin += kAtOnce) {
      const auto block = from.subspan(begin, std::min(kAtOnce, from.size() - begin));
      std::array<std::uint8_t, kAtOnce> found{};  // what fills the last byte is zero
      if (natural_) {
        encode_block<true>(block, norm, levels_, values, seed, begin, sign, found.data());
      } else {
        encode_block<false>(block, norm, levels_, values, seed, begin, sign, found.data());
      }
      const std::size_t whole = (block.size() * kBits + 7) / 8 * (8 / kBits);
      pack<kBits>(std::span(found).first(whole), codes + begin * kBits / 8);
    }
  });
}

Decoded DitheringCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  if (to.empty()) return Decoded::kOk;
  const auto norm = load<float>(from.data());
  const auto norm_bits = std::bit_cast<std::uint32_t>(norm);
  if (norm_bits != kNan && norm_bits >= 0x7f800000) return Decoded::kMalformed;
  const std::byte* codes = from.data() + sizeof norm;
  // By code, which is a level and a sign.
  std::array<float, 256> values{};
  for (std::uint32_t level = 0; level <= levels_; ++level) {
    values[level] = norm * value_of(level);
    values[level | 1U << (bits_ - 1)] = -values[level];
  }
  return choose_bits(bits_, [&]<unsigned kBits>() {
    constexpr std::uint32_t kLevel = (1U << (kBits - 1)) - 1;
    const std::size_t room = (from.size() - sizeof norm) * (8 / kBits);
    std::uint32_t wrong = 0;  // without a branch for each, so that it vectorises
    for (std::size_t i = 0; i < to.size(); ++i) wrong |= (code_at<kBits>(codes, i) & kLevel) > levels_ ? 1 : 0;
    for (std::size_t i = to.size(); i < room; ++i) wrong |= code_at<kBits>(codes, i);
    if (wrong != 0) return Decoded::kMalformed;
    choose(into, [&]<Into kInto>() {
      for (std::size_t i = 0; i < to.size(); ++i) put<kInto>(values[code_at<kBits>(codes, i)], to[i]);
    });
    return Decoded::kOk;
  });
}

}  // namespace bps::compress
