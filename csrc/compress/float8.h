// SPDX-License-Identifier: Apache-2.0
// "mxfp8" and "fp8": 8-bit floats E4M3 (4 bits of exponent, 3 of mantissa, largest 448, no infinity; torch's
// float8_e4m3fn), rounded to nearest even, with a scale per block. What would be larger than 448 becomes 448.
//
// mxfp8 (OCP Microscaling Formats 1.0): blocks of 32, the last one perhaps shorter, each as a byte e, whose scale is
// 2^(e - 127), e at most 246, and then its elements; 1.031 bytes per element. With m the largest magnitude: e =
// floor(log2 m) - 8 + 127, or 0 if that is less, or m is zero. A block with a NaN or infinity has e = 255, and decodes
// to NaN. fp8: blocks of row=R elements (1024 unless given), each as a float32 scale, which is m / 448, or the largest
// of which 448 times is finite if that is less, and its elements, which are x * (1 / scale); 1.004 bytes per element.
// Scales below 2^-126 are zero, and so are their elements; a block with a NaN or infinity has a NaN as its scale.
//
// The codes 0x7f and 0xff, which stand for NaN, are malformed, as are other scales.
#pragma once

#include "compress/codec.h"

namespace bps::compress {

class Mxfp8Codec final : public Codec {
 public:
  static constexpr std::size_t kBlock = 32;
  std::size_t encoded_size(std::size_t elements) const override { return elements + (elements + kBlock - 1) / kBlock; }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;
};

class Fp8RowsCodec final : public Codec {
 public:
  explicit Fp8RowsCodec(Parameters& parameters)
      : row_(static_cast<std::size_t>(parameters.take_integer("row", 1024, 1, std::uint64_t{1} << 32))) {}
  std::size_t encoded_size(std::size_t elements) const override {
    return elements + (elements / row_ + (elements % row_ != 0)) * sizeof(float);
  }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;

 private:
  std::size_t row_;
};

}  // namespace bps::compress
