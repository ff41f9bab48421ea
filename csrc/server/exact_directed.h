// SPDX-License-Identifier: Apache-2.0
// Makes exact sums between two bounds. The one pass of exact_kernels.h tries this first where the processor rounds each
// operation as it is told to. It is only for reduce_avx512.cc.
//
// Each sum is made twice, rounded down and rounded up, and the exact sum lies between. If both are equal, they are the
// exact sum. If both become the same number of the element type, then so does the exact sum. That takes one more
// addition for each term, and no look at it. 16-bit floats are added so in float32. The sum of two float32 or float64
// is rounded once anyway; of more terms, what each addition cuts off is added between bounds. Only float64 makes what
// has to stay unrounded.
#pragma once

#include <type_traits>

#include "server/exact_doubles.h"
#include "server/exact_halves.h"
#include "server/exact_long.h"

namespace bps::server {
namespace {

template <typename Element, bool kUnroundedResult>
class Quick {
 public:
  explicit Quick(const isa::ExactJob& job) : job_(job), in_double_(job.divisor), in_float_(job.divisor) {
    for (std::size_t s = 0; s < job.source_count; ++s) is_plain_ &= !job.unrounded[s];
    may_round_ = !kUnroundedResult && (Element::kNarrows || !job.to_odd);
  }

  // Returns how many elements it has summed, or 0 where each of the next kDoublesInBlock needs a look.
  [[gnu::always_inline]] std::size_t run(std::size_t index) {
    const std::size_t left = job_.count - index;
    if constexpr (Element::kBytes == 2) {
      using Half = std::conditional_t<kUnroundedResult, InTurn<Element>, Pairs<Element>>;
      if (is_plain_ && left >= kHalvesInBlock) {
        return add_halves<Half, Element::kMayBeTiny, kUnroundedResult>(job_, index, in_float_) ? kHalvesInBlock : 0;
      }
    }
    if constexpr (Element::kBytes > 2 && !kUnroundedResult) {
      if (const std::size_t done = run_rounded(index, left); done != 0) return done;
    }
    if (left < kDoublesInBlock) return 0;
    return add_doubles<Element, kUnroundedResult>(job_, index, in_double_) ? kDoublesInBlock : 0;
  }

 private:
  [[gnu::always_inline]] std::size_t run_rounded(std::size_t index, std::size_t left) {
    using T = std::conditional_t<Element::kNarrows, float, double>;
    if (!may_round_ || !is_plain_ || job_.source_count < 2 || left < kLongsInBlock<T>) return 0;
    const auto& division = [this]() -> const auto& {
      if constexpr (Element::kNarrows) {
        return in_float_;
      } else {
        return in_double_;
      }
    }();
    if (job_.source_count == 2 && division.is_exact) return add_two<T>(job_, index, division) ? kLongsInBlock<T> : 0;
    if constexpr (!Element::kNarrows) {
      if (long_ == 0 && left >= kDoublesInBlock) {
        if (add_doubles<Element, kUnroundedResult>(job_, index, in_double_)) return kDoublesInBlock;
        long_ = kRunOfLong;
      }
      if (long_ > 0) --long_;
    }
    return add_long<T>(job_, index, division) ? kLongsInBlock<T> : 0;
  }

  // The neighbours of a sum that is longer than a float64 are longer, too: the shorter way is tried again after so many
  // blocks.
  static constexpr int kRunOfLong = 32;

  const isa::ExactJob& job_;
  Divide<Doubles> in_double_;
  Divide<Floats> in_float_;
  bool is_plain_ = true;
  bool may_round_ = false;  // the result may be rounded to nearest, once
  int long_ = 0;
};

}  // namespace
}  // namespace bps::server
