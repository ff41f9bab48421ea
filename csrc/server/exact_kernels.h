// SPDX-License-Identifier: Apache-2.0
// The one pass of an exact sum. Only for reduce_<isa>.cc; see reduce_math.h for the rules, and exact_sum.h for what is
// computed.
//
// Terms are added in float64, where the sum of a few gradients nearly always fits: an element whose bits are more than
// 53 apart is found by two subtractions, becomes NaN, and is left to ExactJob::repair, as are all that are NaN anyway.
// What is narrower than float64 is divided and narrowed by way of "rounding to odd" (the last bit says whether anything
// was cut off), after which the last rounding is that of the exact value (Boldo and Melquiond, 2008).
#pragma once

#include "server/reduce_kernels.h"

namespace bps::server {
namespace {

using Doubles = Vector<double>;
using Longs = Vector<std::int64_t>;

constexpr std::size_t kDoublesInVector = kVectorBytes / sizeof(double);
// Elements that are worked on together: a vector of float32, which two of float64 hold.
constexpr std::size_t kExactUnit = 2 * kDoublesInVector;

typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));                  // NOLINT: as in reduce_math.h
typedef std::uint16_t HalfShorts __attribute__((vector_size(kVectorBytes / 2)));          // NOLINT
typedef HalfShorts HalfShortsAnywhere __attribute__((aligned(1), may_alias));             // NOLINT

inline bool any(Longs mask) {
  std::int64_t lanes[kDoublesInVector];
  __builtin_memcpy(lanes, &mask, sizeof lanes);
  std::int64_t found = 0;
  for (const std::int64_t lane : lanes) found |= lane;
  return found != 0;
}

inline void widen(Floats from, Doubles* to) {
  HalfFloats halves[2];
  __builtin_memcpy(halves, &from, sizeof from);
  to[0] = __builtin_convertvector(halves[0], Doubles);
  to[1] = __builtin_convertvector(halves[1], Doubles);
}

// To nearest.
inline Floats narrow(const Doubles* from) {
  const HalfFloats halves[2] = {__builtin_convertvector(from[0], HalfFloats),
                                __builtin_convertvector(from[1], HalfFloats)};
  Floats to;
  __builtin_memcpy(&to, halves, sizeof to);
  return to;
}

// To odd: what was cut off leaves the last bit set, so that rounding once more, to fewer bits, knows of it.
inline Floats narrow_to_odd(const Doubles* from) {
  const Floats nearest = narrow(from);
  Doubles back[2];
  widen(nearest, back);
  Doubles steps[2];  // 1 where the magnitude was rounded up, -1 where it was rounded down
  for (int i = 0; i < 2; ++i) {
    const Longs negative = from[i] < 0.0;
    const Longs larger = back[i] > from[i];
    const Longs smaller = back[i] < from[i];
    const Longs up = (larger & ~negative) | (smaller & negative);
    const Longs down = (larger & negative) | (smaller & ~negative);
    steps[i] = (Doubles)(((Longs)(Doubles{} + 1.0) & up) | ((Longs)(Doubles{} - 1.0) & down));
  }
  const Floats above = narrow(steps);
  const Words bits = (Words)nearest;
  const Words even = (bits & 1) - 1;  // all ones where the last bit is clear
  const Words step = ((Words)(above < 0.0F) & 1) | (Words)(above > 0.0F);
  return (Floats)(bits + (step & even));
}

// ---- Element types: how they lie in memory, and how a sum in float64 becomes one

struct ExactFloat32 {
  static constexpr std::size_t kBytes = 4;
  static constexpr bool kNarrows = true;
  static void load(const std::byte* from, Doubles* to) { widen(load_vector<float>(from), to); }
  static void store(std::byte* to, const Doubles* from) { store_vector<float>(to, narrow(from)); }
};

struct ExactFloat64 {
  static constexpr std::size_t kBytes = 8;
  static constexpr bool kNarrows = false;
  static void load(const std::byte* from, Doubles* to) {
    to[0] = load_vector<double>(from);
    to[1] = load_vector<double>(from + kVectorBytes);
  }
  static void store(std::byte* to, const Doubles* from) {
    store_vector<double>(to, from[0]);
    store_vector<double>(to + kVectorBytes, from[1]);
  }
};

template <typename Half>
struct ExactHalf {
  static constexpr std::size_t kBytes = 2;
  static constexpr bool kNarrows = true;
  static void load(const std::byte* from, Doubles* to) {
    const HalfShorts half = *reinterpret_cast<const HalfShortsAnywhere*>(from);
    widen(Half::widen(__builtin_convertvector(half, Words)), to);
  }
  static void store(std::byte* to, const Doubles* from) {
    const Words bits = Half::narrow(narrow_to_odd(from));
    *reinterpret_cast<HalfShortsAnywhere*>(to) = __builtin_convertvector(bits, HalfShorts);
  }
};

// ---- The pass

// a + b, or NaN where that has more bits than a float64. Both subtractions give back the terms only if nothing was
// rounded: the one with the larger term is exact (Dekker 1971, Knuth 1997 4.2.2).
inline Doubles add_exactly(Doubles a, Doubles b) {
  const Doubles sum = a + b;
  const Longs exact = (sum - a == b) & (sum - b == a);
  return (Doubles)((Longs)sum | ~exact);
}

// The quotient, to odd if that is narrowed later.
template <bool kToOdd>
Doubles divide_exactly(Doubles sum, const FloatMath<double>::Divisor& by) {
  if (by.is_power_of_two) return sum * by.reciprocal;
  const Doubles quotient = sum / by.value;
  if constexpr (!kToOdd) return quotient;
  // What is left over, without rounding: the divisor has at most 21 bits, and no half of the quotient more than 32. The
  // first difference is of two numbers that are almost equal.
  const auto high = (Doubles)((Longs)quotient & (~std::int64_t{0} << 32));
  const Doubles rest = (sum - high * by.value) - (quotient - high) * by.value;
  const Longs up = ((rest > 0.0) & (quotient > 0.0)) | ((rest < 0.0) & (quotient < 0.0));
  const Longs down = ((rest > 0.0) & (quotient < 0.0)) | ((rest < 0.0) & (quotient > 0.0));
  const Longs bits = (Longs)quotient;
  const Longs even = (bits & 1) - 1;
  return (Doubles)(bits + ((((Longs{} + 1) & up) | down) & even));
}

template <typename Element>
void load_term(const isa::ExactJob& job, std::size_t source, std::size_t index, Doubles* to) {
  const std::byte* from = job.sources[source];
  if (job.unrounded[source]) {
    ExactFloat64::load(from + index * sizeof(double), to);
  } else {
    Element::load(from + index * Element::kBytes, to);
  }
}

// `index`: of the first element, which the repair is told.
template <typename Element>
[[gnu::always_inline]] inline void exact_step(const isa::ExactJob& job, std::size_t index, std::size_t count,
                                              const FloatMath<double>::Divisor& divisor, Doubles* sum) {
  for (std::size_t s = 1; s < job.source_count; ++s) {
    Doubles next[2];
    load_term<Element>(job, s, index, next);
    sum[0] = add_exactly(sum[0], next[0]);
    sum[1] = add_exactly(sum[1], next[1]);
  }
  const bool is_broken = any((sum[0] != sum[0]) | (sum[1] != sum[1]));
  if (job.divisor != 1) {
    sum[0] = divide_exactly<Element::kNarrows>(sum[0], divisor);
    sum[1] = divide_exactly<Element::kNarrows>(sum[1], divisor);
  }
  if (__builtin_expect(static_cast<long>(is_broken), 0) != 0) {
    double values[kExactUnit];
    __builtin_memcpy(values, sum, sizeof values);
    for (std::size_t i = 0; i < count; ++i) {
      if (values[i] != values[i]) values[i] = job.repair(job.context, index + i);
    }
    __builtin_memcpy(sum, values, sizeof values);
  }
}

template <typename Element, bool kUnroundedResult>
void exact_run(const isa::ExactJob& job) {
  const FloatMath<double>::Divisor divisor(job.divisor);
  const auto write = [&job](std::size_t index, std::size_t count, const Doubles* sum) {
    constexpr std::size_t kBytes = kUnroundedResult ? ExactFloat64::kBytes : Element::kBytes;
    for (std::size_t d = 0; d < job.destination_count; ++d) {
      std::byte* to = job.destinations[d] + index * kBytes;
      std::byte unit[kExactUnit * kBytes];
      std::byte* const place = count == kExactUnit ? to : unit;
      if constexpr (kUnroundedResult) {
        ExactFloat64::store(place, sum);
      } else {
        Element::store(place, sum);
      }
      if (count < kExactUnit) __builtin_memcpy(to, unit, count * kBytes);
    }
  };
  std::size_t index = 0;
  for (; index + kExactUnit <= job.count; index += kExactUnit) {
    Doubles sum[2];
    load_term<Element>(job, 0, index, sum);
    exact_step<Element>(job, index, kExactUnit, divisor, sum);
    write(index, kExactUnit, sum);
  }
  if (index == job.count) return;
  // The rest, by way of copies that are filled up with zeros.
  const std::size_t count = job.count - index;
  Doubles sum[2];
  bool is_first = true;
  for (std::size_t s = 0; s < job.source_count; ++s) {
    const std::size_t bytes = job.unrounded[s] ? sizeof(double) : Element::kBytes;
    std::byte unit[kExactUnit * sizeof(double)] = {};
    __builtin_memcpy(unit, job.sources[s] + index * bytes, count * bytes);
    Doubles next[2];
    job.unrounded[s] ? ExactFloat64::load(unit, next) : Element::load(unit, next);
    for (int i = 0; i < 2; ++i) sum[i] = is_first ? next[i] : add_exactly(sum[i], next[i]);
    is_first = false;
  }
  isa::ExactJob added = job;
  added.source_count = 1;
  exact_step<Element>(added, index, count, divisor, sum);
  write(index, count, sum);
}

template <bool kUnroundedResult>
isa::ExactKernel choose_exact(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return exact_run<ExactFloat32, kUnroundedResult>;
    case Dtype::kFloat64: return exact_run<ExactFloat64, kUnroundedResult>;
    case Dtype::kFloat16: return exact_run<ExactHalf<Float16Bits>, kUnroundedResult>;
    case Dtype::kBfloat16: return exact_run<ExactHalf<Bfloat16Bits>, kUnroundedResult>;
    default: return nullptr;
  }
}

inline isa::ExactKernel choose_exact(Dtype dtype, bool unrounded_result) {
  return unrounded_result ? choose_exact<true>(dtype) : choose_exact<false>(dtype);
}

}  // namespace
}  // namespace bps::server
