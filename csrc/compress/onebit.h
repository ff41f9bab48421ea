// SPDX-License-Identifier: Apache-2.0
// The method "onebit" sends the signs (Seide et al., "1-bit stochastic gradient descent", 2014, with one scale, as
// BytePS has it). It needs feedback=1 to train with.
//
// The code is a float32 scale, then one bit per element, from the lowest bit of each byte, set where the element is
// negative. An element decodes to scale or -scale. With scaling=1 (the default) the scale is the mean magnitude, summed
// as norms.h says, divided in float64, and rounded. It is a NaN when an element is not finite, or the mean is
// too large. With scaling=0 the scale is 1, or the NaN when an element is not finite.
#pragma once

#include "compress/codec.h"

namespace bps::compress {

class OnebitCodec final : public Codec {
 public:
  explicit OnebitCodec(Parameters& parameters) : scaling_(parameters.take_flag("scaling", true)) {}

  std::size_t encoded_size(std::size_t elements) const override {
    return elements == 0 ? 0 : sizeof(float) + (elements + 7) / 8;
  }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;

 private:
  bool scaling_;
};

}  // namespace bps::compress
