// SPDX-License-Identifier: Apache-2.0
#include "compress/onebit.h"

#include <bit>
#include <cmath>

#include "compress/float_bits.h"
#include "compress/norms.h"
#include "compress/store.h"

namespace bps::compress {
namespace {

bool is_mean_magnitude(float scale) {
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  return bits == kNan || bits < kInfinity;
}

}  // namespace

void OnebitCodec::encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t) const {
  if (from.empty()) return;
  auto scale = 1.0F;
  if (scaling_) scale = static_cast<float>(sum_of_magnitudes(from) / static_cast<double>(from.size()));
  if (!std::isfinite(scale) || (!scaling_ && !all_finite(from))) scale = std::bit_cast<float>(kNan);
  store(scale, to.data());
  std::byte* bits = to.data() + sizeof scale;
  std::size_t i = 0;
  for (; i + 8 <= from.size(); i += 8) {
    unsigned byte = 0;
    for (unsigned bit = 0; bit < 8; ++bit) byte |= static_cast<unsigned>(from[i + bit] < 0) << bit;
    *bits++ = static_cast<std::byte>(byte);
  }
  if (i == from.size()) return;
  unsigned byte = 0;
  for (unsigned bit = 0; i + bit < from.size(); ++bit) byte |= static_cast<unsigned>(from[i + bit] < 0) << bit;
  *bits = static_cast<std::byte>(byte);
}

Decoded OnebitCodec::decode(std::span<const std::byte> from, std::span<float> to, Into into) const {
  if (from.size() != encoded_size(to.size())) return Decoded::kWrongSize;
  if (to.empty()) return Decoded::kOk;
  const auto scale = load<float>(from.data());
  const unsigned unused = to.size() % 8 == 0 ? 0 : 0xffU << to.size() % 8 & 0xffU;
  if (!is_mean_magnitude(scale) || (static_cast<unsigned>(from.back()) & unused) != 0) return Decoded::kMalformed;
  const std::byte* bits = from.data() + sizeof scale;
  const auto magnitude = std::bit_cast<std::uint32_t>(scale);
  choose(into, [&]<Into kInto>() {
    for (std::size_t i = 0; i < to.size(); ++i) {
      const std::uint32_t negative = (static_cast<std::uint32_t>(bits[i / 8]) >> i % 8 & 1) << 31;
      put<kInto>(std::bit_cast<float>(magnitude | negative), to[i]);
    }
  });
  return Decoded::kOk;
}

}  // namespace bps::compress
