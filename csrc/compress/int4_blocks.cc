// SPDX-License-Identifier: Apache-2.0
#include "compress/int4_blocks.h"

#include <algorithm>
#include <array>
#include <bit>

#include "compress/float_bits.h"
#include "compress/store.h"

namespace bps::compress {
namespace {

constexpr std::size_t kBlock = Int4BlocksCodec::kBlock;
constexpr std::size_t kHalf = kBlock / 2;
constexpr std::uint16_t kNanScale = 0x7fc0;
constexpr float kShrink = 0x1.6a09e6p-4F;  // 128^-1/2

using Block = std::array<float, kBlock>;

template <std::size_t kDistance>
void butterflies(Block& block) {
  for (std::size_t begin = 0; begin < kBlock; begin += 2 * kDistance) {
    for (std::size_t i = begin; i < begin + kDistance; ++i) {
      const float a = block[i];
      const float b = block[i + kDistance];
      block[i] = a + b;
      block[i + kDistance] = a - b;
    }
  }
}

void rotate(Block& block) {
  for (float& value : block) value *= kShrink;
  butterflies<1>(block);
  butterflies<2>(block);
  butterflies<4>(block);
  butterflies<8>(block);
  butterflies<16>(block);
  butterflies<32>(block);
  butterflies<64>(block);
}

std::uint16_t scale_of(const Block& block) {
  const std::uint32_t largest = largest_magnitude(block);
  if (largest >= kInfinity) return kNanScale;
  const auto bits = std::bit_cast<std::uint32_t>(std::bit_cast<float>(largest) / 7.0F);
  return static_cast<std::uint16_t>(bits < 0x00800000 ? 0 : (bits + 0xffff) >> 16);
}

float widen(std::uint16_t scale) {
  return std::bit_cast<float>(std::uint32_t{scale} << 16);
}

std::uint32_t quantum(float value, float inverse) {
  return std::bit_cast<std::uint32_t>(value * inverse + kRound) & 0xf;
}

float signed_value(std::uint32_t quantum) {
  return static_cast<float>(static_cast<std::int32_t>(quantum ^ 8) - 8);
}

}  // namespace

void Int4BlocksCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const {
  std::byte* at = to.data();
  for (std::size_t begin = 0; begin < from.size(); begin += kBlock, at += kBlockBytes) {
    Block block{};
    const auto values = from.subspan(begin, std::min(kBlock, from.size() - begin));
    std::copy(values.begin(), values.end(), block.begin());
    rotate(block);
    const std::uint16_t scale = scale_of(block);
    store(scale, at);
    std::byte* codes = at + sizeof scale;
    if (scale == 0 || scale == kNanScale) {
      std::fill_n(codes, kHalf, std::byte{0});
      continue;
    }
    const float inverse = 1.0F / widen(scale);
    for (std::size_t i = 0; i < kHalf; ++i) {
      codes[i] = static_cast<std::byte>(quantum(block[i], inverse) | quantum(block[i + kHalf], inverse) << 4);
    }
  }
}

Decoded Int4BlocksCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  for (std::size_t at = 0; at < from.size(); at += kBlockBytes) {
    const auto scale = load<std::uint16_t>(from.data() + at);
    if (scale != 0 && scale != kNanScale && (scale < 0x0080 || scale >= 0x7f80)) return Decoded::kMalformed;
  }
  choose(into, [&]<Into kInto>() {
    const std::byte* at = from.data();
    for (std::size_t begin = 0; begin < to.size(); begin += kBlock, at += kBlockBytes) {
      const float scale = widen(load<std::uint16_t>(at));
      const std::byte* codes = at + sizeof(std::uint16_t);
      Block block;
      for (std::size_t i = 0; i < kHalf; ++i) {
        const auto byte = static_cast<std::uint32_t>(codes[i]);
        block[i] = scale * signed_value(byte & 0xf);
        block[i + kHalf] = scale * signed_value(byte >> 4);
      }
      rotate(block);
      const auto values = to.subspan(begin, std::min(kBlock, to.size() - begin));
      for (std::size_t i = 0; i < values.size(); ++i) put<kInto>(block[i], values[i]);
    }
  });
  return Decoded::kOk;
}

}  // namespace bps::compress
