// SPDX-License-Identifier: Apache-2.0
// The methods "topk" and "randomk" send some elements as they are, and the others not at all. They need feedback=1 to
// train with.
//
// k=K below 1 is a share of the partition's elements, rounded down, but at least one element. From 1 on it is a number
// of elements. All are sent if there are no more.
//
// topk sends the elements of largest magnitude. Of equal ones it takes the first, and NaN counts as the largest. The
// indices come first, as ascending 32-bit integers, then the values as float32: 8 bytes per element that is sent.
// randomk sends the seed as 64 bits, then values as float32: 4 bytes per element. The partition of n elements is cut
// into K runs, run j from floor(j * n / K). Of each run of r elements the one at (random_bits(seed, j) >> 32) * r >> 32
// is sent (random.h). So each element has about the same chance, and none is sent twice. Where any element of the
// partition is not finite, the first value is NaN, so that no overflow is lost.
#pragma once

#include "compress/codec.h"

namespace bps::compress {

class SparseCodec : public Codec {
 public:
  explicit SparseCodec(Parameters& parameters) : k_(parameters.take_number("k", 0.01, 1e-9, 1e18)) {}

 protected:
  std::size_t sent(std::size_t elements) const;

 private:
  double k_;
};

class TopkCodec final : public SparseCodec {
 public:
  using SparseCodec::SparseCodec;
  std::size_t encoded_size(std::size_t elements) const override { return sent(elements) * 8; }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;
};

class RandomkCodec final : public SparseCodec {
 public:
  using SparseCodec::SparseCodec;
  std::size_t encoded_size(std::size_t elements) const override {
    return elements == 0 ? 0 : sizeof(std::uint64_t) + sent(elements) * 4;
  }
  void encode(std::span<const float> from, std::span<std::byte> to, std::uint64_t seed) const override;
  [[nodiscard]] Decoded decode(std::span<const std::byte> from, std::span<float> to, Into into) const override;
};

}  // namespace bps::compress
