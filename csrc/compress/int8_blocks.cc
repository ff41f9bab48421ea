// SPDX-License-Identifier: Apache-2.0
#include "compress/int8_blocks.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "compress/float_bits.h"
#include "compress/store.h"

namespace bps::compress {
namespace {

constexpr float kSmallestScale = std::numeric_limits<float>::min();
static_assert(127.0 * Int8BlocksCodec::kLargestScale <= std::numeric_limits<float>::max());

float scale_of(std::uint32_t largest) {
  if (largest >= kInfinity) return std::bit_cast<float>(kNan);
  const float scale = std::bit_cast<float>(largest) / 127.0F;
  return scale < kSmallestScale ? 0.0F : std::min(scale, Int8BlocksCodec::kLargestScale);
}

bool is_scale(float scale) {
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  return bits == 0 || bits == kNan || (scale >= kSmallestScale && scale <= Int8BlocksCodec::kLargestScale);
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
    if (!is_scale(load<float>(from.data() + at))) return Decoded::kMalformed;
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
