// SPDX-License-Identifier: Apache-2.0
// The method "dithering" rounds magnitudes at random to a few levels, so that the expected value is the element
// (Alistarh et al., "QSGD", 2017; natural levels: Horvath et al., "Natural compression", 2019; as BytePS has them).
//
// k=K (1 to 127, 4 unless given) is the number of levels above zero. normalize=max|l2 says what the highest level
// stands for, the largest magnitude or the Euclidean norm (norms.h), as float32. With partition=linear level j is j / K
// of it, with natural level j > 0 is 2^(j - K) of it. An element lies at y = min(|x| / norm, 1), between two levels a
// <= y <= b, and becomes b if random_unit(seed, its index) < (y - a) / (b - a), else a. All is computed in float32.
//
// The code is the norm, then the levels, each below its sign, in 2, 4 or 8 bits as needed, from the lowest bits of each
// byte. The norm is a NaN, as is all that is decoded, if an element is a NaN or infinity, or the norm too large.
#pragma once

#include "compress/codec.h"

namespace bps::compress {

class DitheringCodec final : public Codec {
 public:
  explicit DitheringCodec(Parameters& parameters)
      : levels_(static_cast<std::uint32_t>(parameters.take_integer("k", 4, 1, 127))),
        bits_(levels_ < 2   ? 2
              : levels_ < 8 ? 4
                            : 8),
        natural_(parameters.take_choice("partition", "linear|natural") == 1),
        l2_(parameters.take_choice("normalize", "max|l2") == 1) {}

  std::size_t encoded_size(std::size_t elements) const override {
    return elements == 0 ? 0 : sizeof(float) + (elements * bits_ + 7) / 8;
  }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;

 private:
  float norm_of(std::span<const float> values) const;
  float value_of(std::uint32_t level) const;  // as a share of the norm

  std::uint32_t levels_;
  unsigned bits_;
  bool natural_;
  bool l2_;
};

}  // namespace bps::compress
