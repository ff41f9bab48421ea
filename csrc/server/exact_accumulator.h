// SPDX-License-Identifier: Apache-2.0
// Adds arrays of floating point, element by element, without rounding. A rank does so with its micro-batches before the
// ranks add theirs.
//
// Each element is a float64 as long as that holds the sum, which it does if the sum is not finite. When it no longer
// does, the element is NaN from then on, and the sum is in a superaccumulator beside it. There are as many of these as
// it takes. One thread at a time may use it. May throw std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/dtype.h"
#include "server/superaccumulator.h"

namespace bps::server {

class ExactAccumulator {
 public:
  // `dtype` is float32, float64, float16 or bfloat16. Sums begin as negative zeros, which change nothing that they are
  // added to.
  ExactAccumulator(Dtype dtype, std::size_t elements);

  Dtype dtype() const { return dtype_; }
  std::size_t elements() const { return sums_.size(); }
  void clear();
  // Adds an array of elements() elements of the type. Afterwards each sum is right, or is NaN and listed by beyond().
  void add(const std::byte* elements);

  // Returns the sums, with NaN where a sum is NaN or a float64 does not hold it.
  std::span<const double> sums() const { return sums_; }
  // Returns the elements that a float64 does not hold, ascending.
  std::vector<std::uint32_t> beyond() const;
  // Writes three values for each of these elements: whether its sum is NaN, positive infinite, negative infinite. A sum
  // over ranks in which one of these is true on any rank needs no parts().
  void specials(std::span<const std::uint32_t> elements, std::span<bool> into) const;
  // Returns, for each of these elements, Superaccumulator::kParts numbers that can be added to those of other ranks.
  std::vector<double> parts(std::span<const std::uint32_t> elements) const;

  // Writes the sum of all ranks, divided by `divisor` and rounded to the type: `sums` is what the ranks' sums() add up
  // to, rounded to odd where it has to be. `parts` is what the ranks' parts() of `elements` add up to. `is_divided`
  // says that `sums` are divided already, as float64 needs, because it cannot be rounded again.
  void round(std::span<const double> sums, std::span<const std::uint32_t> elements, std::span<const double> parts,
             std::uint32_t divisor, bool is_divided, std::byte* into) const;

 private:
  double keep(std::size_t element);

  Dtype dtype_;
  std::vector<double> sums_;
  std::map<std::uint32_t, Superaccumulator> beyond_;
  const std::byte* adding_ = nullptr;
};

}  // namespace bps::server
