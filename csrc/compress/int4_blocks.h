// SPDX-License-Identifier: Apache-2.0
// The method "int4" cuts elements into blocks of 128, the last one filled up with zeros. Each is rotated, then sent as
// a bfloat16 scale and 4 bits per element; 0.516 bytes per element. It is meant to be used with feedback=1.
//
// The rotation is the Walsh-Hadamard transform times 128^-1/2, its own inverse. It spreads an outlier over the block
// (as in Ashkboos et al., "QuaRot", 2024). First every element is multiplied by the float32 nearest to 128^-1/2. Then
// for each distance 1, 2, 4 ... 64 pairs (a, b) at that distance become (a + b, a - b), all in float32. With m the
// largest magnitude after it, the scale is m / 7, as bfloat16, rounded up; below 2^-126 it is zero. An element becomes
// x * (1 / scale), rounded to nearest even, from -7 to 7, in two's complement. Element i of a block lies in the low
// half of byte i if i < 64, else in the high half of byte i - 64. A block with a NaN or infinity, before or after the
// rotation, has the scale NaN and decodes to NaN. One with elements near the largest float32 may decode to infinities.
#pragma once

#include "compress/codec.h"

namespace bps::compress {

class Int4BlocksCodec final : public Codec {
 public:
  static constexpr std::size_t kBlock = 128;
  static constexpr std::size_t kBlockBytes = 2 + kBlock / 2;

  std::size_t encoded_size(std::size_t elements) const override {
    return (elements / kBlock + (elements % kBlock != 0)) * kBlockBytes;
  }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;
};

}  // namespace bps::compress
