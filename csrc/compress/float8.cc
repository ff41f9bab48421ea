// SPDX-License-Identifier: Apache-2.0
#include "compress/float8.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "compress/float_bits.h"
#include "compress/store.h"

namespace bps::compress {
namespace {

constexpr float kLargest = 448;
constexpr float kLargestRowScale = 0x1.249248p119F;  // the largest of which 448 times is finite
constexpr std::uint32_t kLargestExponent = 254 - 8;

// Branches are selections, so that loops vectorise. A subnormal is a multiple of 2^-9, the last place of a float32 in
// [2^14, 2^15): adding 2^14 rounds to it.
std::uint8_t narrow(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t limited = std::min(bits & 0x7fffffff, std::bit_cast<std::uint32_t>(kLargest));
  const std::uint32_t normal = (limited - 0x3c000000 + 0x7ffff + ((limited >> 20) & 1)) >> 20;
  const std::uint32_t tiny = std::bit_cast<std::uint32_t>(std::bit_cast<float>(limited) + 0x1p14F) - 0x46800000;
  const std::uint32_t code = limited < 0x3c800000 ? tiny : normal;
  return static_cast<std::uint8_t>(code | ((bits >> 24) & 0x80));
}

float widen(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fU;
  const std::uint32_t normal = (magnitude << 20) + 0x3c000000;
  const auto tiny = std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9F);
  return std::bit_cast<float>((magnitude < 8 ? tiny : normal) | ((code & 0x80U) << 24));
}

void encode_scaled(std::span<const float> from, float factor, std::byte* to) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = static_cast<std::byte>(narrow(from[i] * factor));
}

template <Into kInto>
void decode_scaled(const std::byte* from, float scale, std::span<float> to) {
  for (std::size_t i = 0; i < to.size(); ++i) put<kInto>(widen(static_cast<std::uint8_t>(from[i])) * scale, to[i]);
}

bool has_nan(std::span<const std::byte> codes) {
  unsigned found = 0;
  for (const std::byte code : codes) found |= static_cast<unsigned>((static_cast<unsigned>(code) & 0x7fU) == 0x7fU);
  return found != 0;
}

// 2^(e - 127), for e from 0 to 254.
float power(std::uint32_t e) {
  return std::bit_cast<float>(e == 0 ? 0x00400000U : e << 23);
}

// Decodes blocks of `length` elements, each behind its scale, once all of them are found valid. value_of(scale) is the
// factor of its elements.
template <typename Scale>
Decoded decode_blocks(std::span<const std::byte> from, std::span<float> to, std::size_t length, Into into,
                      const auto& is_scale, const auto& value_of) {
  const auto visit = [&](const auto& function) {
    const std::byte* at = from.data();
    for (std::size_t begin = 0; begin < to.size(); begin += length) {
      const auto block = to.subspan(begin, std::min(length, to.size() - begin));
      if (!function(load<Scale>(at), at + sizeof(Scale), block)) return false;
      at += sizeof(Scale) + block.size();
    }
    return true;
  };
  const bool valid = visit([&](Scale scale, const std::byte* codes, std::span<float> block) {
    return is_scale(scale) && !has_nan({codes, block.size()});
  });
  if (!valid) return Decoded::kMalformed;
  choose(into, [&]<Into kInto>() {
    visit([&](Scale scale, const std::byte* codes, std::span<float> block) {
      decode_scaled<kInto>(codes, value_of(scale), block);
      return true;
    });
  });
  return Decoded::kOk;
}

}  // namespace

void Mxfp8Codec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const {
  for (std::size_t begin = 0; begin < from.size(); begin += kBlock) {
    const auto block = from.subspan(begin, std::min(kBlock, from.size() - begin));
    std::byte* at = to.data() + encoded_size(begin);
    const std::uint32_t largest = largest_magnitude(block);
    if (largest >= kInfinity) {
      std::fill_n(at, 1 + block.size(), std::byte{0});
      *at = std::byte{255};
      continue;
    }
    const std::uint32_t exponent = largest >> 23;  // biased; 8 is that of the largest E4M3
    const std::uint32_t e = exponent > 8 ? exponent - 8 : 0;
    *at = static_cast<std::byte>(e);
    encode_scaled(block, power(254 - e), at + 1);
  }
}

Decoded Mxfp8Codec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  return decode_blocks<std::uint8_t>(
      from, to, kBlock, into, [](std::uint8_t e) { return e <= kLargestExponent || e == 255; },
      [](std::uint8_t e) { return e == 255 ? std::bit_cast<float>(kNan) : power(e); });
}

void Fp8RowsCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const {
  for (std::size_t begin = 0; begin < from.size(); begin += row_) {
    const auto row = from.subspan(begin, std::min(row_, from.size() - begin));
    std::byte* at = to.data() + encoded_size(begin);
    const std::uint32_t largest = largest_magnitude(row);
    float scale = std::min(std::bit_cast<float>(largest) / kLargest, kLargestRowScale);
    if (largest >= kInfinity) scale = std::bit_cast<float>(kNan);
    if (scale < std::numeric_limits<float>::min()) scale = 0;
    store(scale, at);
    at += sizeof scale;
    if (scale > 0) {
      encode_scaled(row, 1.0F / scale, at);
    } else {
      std::fill_n(at, row.size(), std::byte{0});
    }
  }
}

Decoded Fp8RowsCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  const auto is_scale = [](float scale) {
    const auto bits = std::bit_cast<std::uint32_t>(scale);
    return bits == 0 || bits == kNan || (scale >= std::numeric_limits<float>::min() && scale <= kLargestRowScale);
  };
  return decode_blocks<float>(from, to, row_, into, is_scale, [](float scale) { return scale; });
}

}  // namespace bps::compress
