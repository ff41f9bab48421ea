// SPDX-License-Identifier: Apache-2.0
// Makes sums of floating point that are rounded once. They have the same bits for any number of ranks, order,
// placement, partition size and grouping.
//
// A sum is that of exact arithmetic, rounded to nearest even; an average is that sum, divided exactly, rounded once. It
// does not matter in how many steps terms were added as long as none of them was rounded. A zero is negative only if
// all terms are. NaN is always the same quiet one. exact_kernels.h makes this fast, and superaccumulator.h does what it
// cannot.
//
// One thread uses it. It allocates only when it gets more sources than ever before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "server/reduce.h"
#include "tensor/unrounded.h"

namespace bps::server {

class ExactSum {
 public:
  // Begins the sum of one partition. With `unrounded` the sum is written there, and not divided; the caller must
  // finish() it.
  void begin(const Reduction& what, tensor::UnroundedWriter* unrounded = nullptr);
  // These name the sources in turn: elements of the type, or what a host has summed.
  void add_plain() { add({}, false); }
  void add_unrounded(const tensor::UnroundedReader& reader) { add(reader, true); }

  // Sums the elements `first` up to `first + count`; calls must be in their order. `sources` says where these elements
  // lie, by source; it is null for those that are unrounded. A destination may be a source, at the same place or, for
  // one that is unrounded, from where its header begins.
  void sum(std::size_t first, std::size_t count, std::span<const std::byte*> sources,
           std::span<std::byte* const> destinations);

 private:
  void add(const tensor::UnroundedReader& reader, bool is_unrounded) {
    readers_.push_back(reader);
    is_unrounded_.push_back(static_cast<std::uint8_t>(is_unrounded));
  }
  double repair(std::size_t index);

  Reduction what_{};
  tensor::UnroundedWriter* writer_ = nullptr;
  std::vector<tensor::UnroundedReader> readers_;  // by source
  std::vector<std::uint8_t> is_unrounded_;        // by source
  std::span<const std::byte*> sources_;           // those of the call in progress
  std::size_t first_ = 0;
};

}  // namespace bps::server
