// SPDX-License-Identifier: Apache-2.0
#include "compress/int8_blocks.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "compress/store.h"

namespace bps::compress {
namespace {

constexpr float kLargestScale = Int8BlocksCodec::kLargestScale;
constexpr float kSmallestScale = std::numeric_limits<float>::min();
constexpr std::uint32_t kInfinity = 0x7f800000;
constexpr std::uint32_t kNan = 0x7fc00000;
static_assert(127.0 * kLargestScale <= std::numeric_limits<float>::max());

// Adding it to a magnitude below 2^22 rounds to an integer, which is then in the low bits, in two's complement.
constexpr float kRound = 0x1.8p23F;

// As bits: magnitudes of floats are ordered as integers are, and NaN is above infinity.
std::uint32_t largest_magnitude(std::span<const float> block) {
  std::uint32_t largest = 0;
  for (const float value : block) largest = std::max(largest, std::bit_cast<std::uint32_t>(value) & 0x7fffffff);
  return largest;
}

float scale_of(std::uint32_t largest) {
  if (largest >= kInfinity) return std::bit_cast<float>(kNan);
  const float scale = std::bit_cast<float>(largest) / 127.0F;
  return scale < kSmallestScale ? 0.0F : std::min(scale, kLargestScale);
}

bool valid_scale(float scale) {
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  return bits == 0 || bits == kNan || (scale >= kSmallestScale && scale <= kLargestScale);
}

void encode_block(std::span<const float> from, std::byte* to) {
  const float scale = scale_of(largest_magnitude(from));
  store(scale, to);
  to += sizeof(float);
  if (!(scale > 0)) {
    std::fill_n(to, from.size(), std::byte{0});
    return;
  }
  const float inverse = 1.0F / scale;
  for (std::size_t i = 0; i < from.size(); ++i) {
    to[i] = static_cast<std::byte>(std::bit_cast<std::uint32_t>(from[i] * inverse + kRound));
  }
}

}  // namespace

void Int8BlocksCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const {
  for (std::size_t begin = 0; begin < from.size(); begin += kBlock) {
    const auto block = from.subspan(begin, std::min(kBlock, from.size() - begin));
    encode_block(block, to.data() + encoded_size(begin));
  }
}

Decoded Int8BlocksCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  constexpr std::size_t kStride = kBlock + sizeof(float);
  for (std::size_t at = 0; at < from.size(); at += kStride) {
    if (!valid_scale(load<float>(from.data() + at))) return Decoded::kMalformed;
  }
  choose(into, [&]<Into kInto>() {
    const std::byte* bytes = from.data();
    for (std::size_t begin = 0; begin < to.size(); begin += kBlock, bytes += kStride) {
      const auto block = to.subspan(begin, std::min(kBlock, to.size() - begin));
      const auto scale = load<float>(bytes);
      const std::byte* quanta = bytes + sizeof(float);
      for (std::size_t i = 0; i < block.size(); ++i) {
        put<kInto>(scale * static_cast<float>(static_cast<std::int8_t>(quanta[i])), block[i]);
      }
    }
  });
  return Decoded::kOk;
}

}  // namespace bps::compress
