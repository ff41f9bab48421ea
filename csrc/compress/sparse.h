// SPDX-License-Identifier: Apache-2.0
// "topk" and "randomk": some elements travel as they are, and the others not at all. They need feedback=1 to train
// with.
//
// k=K: below 1 it is a share of the partition's elements, rounded down, but at least one element; from 1 on a number of
// elements. All, if there are no more.
//
// topk: the elements of largest magnitude; of equal ones the first; NaN counts as larger than everything. The indices
// come first, as 32-bit integers in ascending order, then the values as float32: 8 bytes per element that is sent.
// randomk: the seed as 64 bits, then the values as float32: 4 bytes per element. The partition of n elements is cut
// into K runs, run j from floor(j * n / K); of each run of r elements the one at (random_bits(seed, j) >> 32) * r >> 32
// is sent (random.h). So each element has about the same chance, and none is sent twice.
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
