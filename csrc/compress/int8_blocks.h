// SPDX-License-Identifier: Apache-2.0
// The method "int8" sends blocks of 256 elements, the last one perhaps shorter, each as a float32 scale and then one
// signed byte per element; 1.016 bytes per element.
//
// With m the largest magnitude of a block, scale = m / 127 and byte = x * (1 / scale). Every operation is in float32,
// and the result is rounded to nearest even. An element decodes to scale * byte, within half a scale of what it was.
// Three blocks are special, so that nothing overflows on the way and no NaN or infinity is lost:
// - m / 127 > kLargestScale: the scale is kLargestScale, at most one unit in the last place less;
// - m / 127 < 2^-126: scale and bytes are zero;
// - with a NaN or an infinity: the scale is the NaN 0x7fc00000 and the bytes are zero; all elements decode to NaN.
// Any other scale that is negative, subnormal, infinite, NaN or above kLargestScale is malformed. An encoder never
// writes the byte -128; a decoder takes it as a number like the others.
#pragma once

#include "compress/codec.h"

namespace bps::compress {

class Int8BlocksCodec final : public Codec {
 public:
  static constexpr std::size_t kBlock = 256;
  static constexpr float kLargestScale = 0x1.020406p121F;  // the largest of which 127 times is finite

  std::size_t encoded_size(std::size_t elements) const override {
    return elements + (elements / kBlock + (elements % kBlock != 0)) * sizeof(float);
  }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;
};

}  // namespace bps::compress
