// SPDX-License-Identifier: Apache-2.0
// The methods "mxfp8" and "fp8" send 8-bit floats E4M3 (4 bits of exponent, 3 of mantissa, largest 448, no infinity;
// torch's float8_e4m3fn), rounded to nearest even, with a scale per block. A larger value becomes 448.
//
// mxfp8 (OCP Microscaling Formats 1.0) has blocks of 32, the last one perhaps shorter. Each is a byte e, whose scale is
// 2^(e - 127), e at most 246, and then its elements; 1.031 bytes per element. With m the largest magnitude, e =
// floor(log2 m) - 8 + 127, or 0 if that is less, or m is zero. A block with a NaN or infinity has e = 255, and decodes
// to NaN. fp8 has blocks of row=R elements (1024 unless given). Each is a float32 scale and its elements, which are x *
// (1 / scale); 1.004 bytes per element. The scale is m / 448, or the largest of which 448 times is finite if that is
// less. A scale below 2^-126 is zero, and so are its elements; a block with a NaN or infinity has a NaN as its scale.
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
