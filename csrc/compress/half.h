// SPDX-License-Identifier: Apache-2.0
// The methods "bf16" and "fp16" send each element as a 16-bit float, rounded to nearest even; 2 bytes per element.
//
// A value too large for the format becomes infinity (fp16: from 65520), NaN stays a NaN of the same sign, and
// subnormals keep their values. Every string of bytes of the right size is valid.
#pragma once

#include "compress/codec.h"

namespace bps::compress {

class Bfloat16Codec final : public Codec {
 public:
  std::size_t encoded_size(std::size_t elements) const override { return elements * 2; }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;
};

class Float16Codec final : public Codec {
 public:
  std::size_t encoded_size(std::size_t elements) const override { return elements * 2; }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;
};

}  // namespace bps::compress
