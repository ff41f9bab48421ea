// SPDX-License-Identifier: Apache-2.0
#include "compress/half.h"

#include <bit>

#include "compress/store.h"

namespace bps::compress {
namespace {

// All branches are selections, so that the loops below vectorise.

struct Bfloat16 {
  static std::uint16_t narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    const std::uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return static_cast<std::uint16_t>((nan ? bits | 0x400000 : rounded) >> 16);
  }
  static float widen(std::uint16_t half) { return std::bit_cast<float>(std::uint32_t{half} << 16); }
};

// A subnormal half is a multiple of 2^-24, the last place of a float32 in [0.5, 1): adding 0.5 rounds to it,
// subtracting 0.5 leaves its value.
struct Float16 {
  static std::uint16_t narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7fffffff;
    const std::uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const std::uint32_t tiny = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000;
    const std::uint32_t finite = magnitude < 0x38800000 ? tiny : normal;
    const std::uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    return static_cast<std::uint16_t>((magnitude < 0x477ff000 ? finite : large) | ((bits >> 16) & 0x8000));
  }
  static float widen(std::uint16_t half) {
    const std::uint32_t magnitude = half & 0x7fffU;
    const std::uint32_t normal = (magnitude << 13) + 0x38000000;  // the exponent's bias, 15, becomes 127
    const std::uint32_t infinite = (magnitude << 13) | 0x7f800000;
    const auto tiny = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude | 0x3f000000) - 0.5F);
    const std::uint32_t bits = magnitude < 0x400 ? tiny : magnitude < 0x7c00 ? normal : infinite;
    return std::bit_cast<float>(bits | ((half & 0x8000U) << 16));
  }
};

template <typename Half>
void encode_halves(std::span<const float> from, std::byte* to) {
  for (std::size_t i = 0; i < from.size(); ++i) store(Half::narrow(from[i]), to + 2 * i);
}

template <typename Half>
Decoded decode_halves(std::span<const std::byte> from, std::span<float> to, Into into) {
  if (from.size() % 2 != 0 || from.size() / 2 != to.size()) return Decoded::kWrongSize;
  choose(into, [&]<Into kInto>() {
    for (std::size_t i = 0; i < to.size(); ++i) {
      put<kInto>(Half::widen(load<std::uint16_t>(from.data() + 2 * i)), to[i]);
    }
  });
  return Decoded::kOk;
}

}  // namespace

void Bfloat16Codec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const {
  encode_halves<Bfloat16>(from, to.data());
}

Decoded Bfloat16Codec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  return decode_halves<Bfloat16>(from, to, into);
}

void Float16Codec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const {
  encode_halves<Float16>(from, to.data());
}

Decoded Float16Codec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  return decode_halves<Float16>(from, to, into);
}

}  // namespace bps::compress
