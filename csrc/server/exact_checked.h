// SPDX-License-Identifier: Apache-2.0
// Makes exact sums with a look at each addition. An element whose bits are more than 53 apart is found by two
// subtractions, becomes NaN, and is left to ExactJob::repair, as are all that are NaN anyway. It is only for
// reduce_<isa>.cc.
#pragma once

#include "server/exact_units.h"

namespace bps::server {
namespace {

// Returns a + b, or NaN where that has more bits than a float64. Both subtractions give back the terms only if nothing
// was rounded: the one with the larger term is exact (Dekker 1971, Knuth 1997 4.2.2).
inline Doubles add_exactly(Doubles a, Doubles b) {
  const Doubles sum = a + b;
  const Longs exact = (sum - a == b) & (sum - b == a);
  return (Doubles)((Longs)sum | ~exact);
}

// Returns the quotient, rounded to odd if it is narrowed later.
template <bool kToOdd>
Doubles divide_exactly(Doubles sum, const FloatMath<double>::Divisor& divisor) {
  if (divisor.is_power_of_two) return sum * divisor.reciprocal;
  const Doubles quotient = sum / divisor.value;
  if constexpr (!kToOdd) return quotient;
  // The rest is not rounded: the divisor has at most 21 bits, and no half of the quotient more than 32. The first
  // difference is of two numbers that are almost equal.
  const auto high = (Doubles)((Longs)quotient & (~std::int64_t{0} << 32));
  const Doubles rest = (sum - high * divisor.value) - (quotient - high) * divisor.value;
  const Longs up = ((rest > 0.0) & (quotient > 0.0)) | ((rest < 0.0) & (quotient < 0.0));
  const Longs down = ((rest > 0.0) & (quotient < 0.0)) | ((rest < 0.0) & (quotient > 0.0));
  const Longs bits = (Longs)quotient;
  const Longs even = (bits & 1) - 1;
  return (Doubles)(bits + ((((Longs{} + 1) & up) | down) & even));
}

template <typename Element>
void load_wide(const std::byte* from, Doubles* to) {
  if constexpr (Element::kNarrows) {
    widen(Element::load(from), to);
  } else {
    Element::load(from, to);
  }
}

// These load the sources of a unit: in place, or, for the last, incomplete unit, from copies that are filled up with
// zeros.
template <typename Element>
struct UnitInPlace {
  void load(const isa::ExactJob& job, std::size_t source, std::size_t index, Doubles* to) const {
    const std::byte* from = job.sources[source];
    if (job.unrounded[source]) {
      ExactFloat64::load(from + index * sizeof(double), to);
    } else {
      load_wide<Element>(from + index * Element::kBytes, to);
    }
  }
  static constexpr std::size_t count() { return kExactUnit; }
};
template <typename Element>
struct UnitOfRest {
  void load(const isa::ExactJob& job, std::size_t source, std::size_t index, Doubles* to) const {
    const std::size_t bytes = job.unrounded[source] ? sizeof(double) : Element::kBytes;
    std::byte unit[kExactUnit * sizeof(double)] = {};
    __builtin_memcpy(unit, job.sources[source] + index * bytes, rest * bytes);
    job.unrounded[source] ? ExactFloat64::load(unit, to) : load_wide<Element>(unit, to);
  }
  std::size_t count() const { return rest; }
  std::size_t rest;
};

// Adds one unit, with a look at every addition. All is read before anything is written. `index` is that of the unit's
// first element.
template <typename Element, bool kUnroundedResult, typename Unit>
[[gnu::noinline]] void add_checked(const isa::ExactJob& job, std::size_t index,
                                   const FloatMath<double>::Divisor& divisor, Unit unit) {
  Doubles sum[2];
  unit.load(job, 0, index, sum);
  for (std::size_t s = 1; s < job.source_count; ++s) {
    Doubles next[2];
    unit.load(job, s, index, next);
    sum[0] = add_exactly(sum[0], next[0]);
    sum[1] = add_exactly(sum[1], next[1]);
  }
  const bool is_broken = any((sum[0] != sum[0]) | (sum[1] != sum[1]));
  if (job.divisor != 1) {
    sum[0] = divide_exactly<Element::kNarrows>(sum[0], divisor);
    sum[1] = divide_exactly<Element::kNarrows>(sum[1], divisor);
  }
  const std::size_t count = unit.count();
  if (is_broken) {
    double values[kExactUnit];
    __builtin_memcpy(values, sum, sizeof values);
    for (std::size_t i = 0; i < count; ++i) {
      if (values[i] != values[i]) values[i] = job.repair(job.context, index + i);
    }
    __builtin_memcpy(sum, values, sizeof values);
  }
  constexpr std::size_t kBytes = kUnroundedResult ? ExactFloat64::kBytes : Element::kBytes;
  std::byte result[kExactUnit * kBytes];
  if constexpr (kUnroundedResult) {
    ExactFloat64::store(result, sum);
  } else {
    Element::store(result, sum);
  }
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    __builtin_memcpy(job.destinations[d] + index * kBytes, result, count * kBytes);
  }
}

}  // namespace
}  // namespace bps::server
