// SPDX-License-Identifier: Apache-2.0
// Sums of floating point that are rounded once: the same bits for any number of ranks, order, placement, partition size
// and grouping.
//
// A sum is that of exact arithmetic, rounded to nearest even; an average is that sum, divided exactly, rounded once; it
// does not matter in how many steps terms were added as long as none of them was rounded. Zeros: negative only if all
// terms are. NaN: always the same quiet one. See exact_kernels.h for how it is fast, and superaccumulator.h for what is
// done where that does not do.
//
// Threading: one thread. Nothing allocates but add_source(), while it has never seen as many.
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
  // Begins the sum of one partition. With `unrounded` it is written there, and not divided; the caller must finish()
  // it.
  void begin(const Reduction& what, tensor::UnroundedWriter* unrounded = nullptr);
  // Names the sources in turn: elements of the type, or what a host has summed.
  void add_plain() { add({}, false); }
  void add_unrounded(const tensor::UnroundedReader& reader) { add(reader, true); }

  // Elements `first` up to `first + count`; calls must be in their order. `sources`: where these elements lie, by
  // source; null for those that are unrounded. A destination may be a source, at the same place or, for one that is
  // unrounded, from where its header begins.
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
  std::span<const std::byte*> sources_;           // of the call in progress
  std::size_t first_ = 0;
};

}  // namespace bps::server
