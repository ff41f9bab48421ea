// SPDX-License-Identifier: Apache-2.0
// The one pass of an exact sum. Only for reduce_<isa>.cc; see reduce_math.h for the rules, and exact_sum.h for what is
// computed.
//
// Terms are added in float64, where the sum of a few gradients nearly always fits. A run of elements is first added
// without a look at each: the exponents of its largest and smallest terms say whether anything could have been rounded.
// If so, it is added again, and an element whose bits are more than 53 apart is found by two subtractions, becomes NaN,
// and is left to ExactJob::repair, as are all that are NaN anyway.
//
// What is narrower than float64 is divided and narrowed by way of "rounding to odd" (the last bit says whether anything
// was cut off), after which the last rounding is that of the exact value (Boldo and Melquiond, 2008). Where a plain
// rounding cannot go wrong, that is taken instead.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "server/reduce_kernels.h"

namespace bps::server {
namespace {

using Doubles = Vector<double>;
using Longs = Vector<std::int64_t>;

constexpr std::size_t kDoublesInVector = kVectorBytes / sizeof(double);
// Elements that are worked on together: a vector of float32, which two of float64 hold.
constexpr std::size_t kExactUnit = 2 * kDoublesInVector;

typedef std::uint16_t HalfShorts __attribute__((vector_size(kVectorBytes / 2)));  // NOLINT
typedef HalfShorts HalfShortsAnywhere __attribute__((aligned(1), may_alias));     // NOLINT

inline bool any(Longs mask) {
  std::int64_t lanes[kDoublesInVector];
  __builtin_memcpy(lanes, &mask, sizeof lanes);
  std::int64_t found = 0;
  for (const std::int64_t lane : lanes) found |= lane;
  return found != 0;
}

// gcc 12 converts a vector of AVX2 or AVX-512 in pieces, unless it is told the instruction. With a mask, of all ones,
// for the reason that reduce_avx512.cc gives.
#if defined(__AVX512BW__)
inline void widen(Floats from, Doubles* to) {
  __m256 halves[2];
  __builtin_memcpy(halves, &from, sizeof from);
  to[0] = (Doubles)_mm512_maskz_cvtps_pd(0xff, halves[0]);
  to[1] = (Doubles)_mm512_maskz_cvtps_pd(0xff, halves[1]);
}
// To nearest.
inline Floats narrow(const Doubles* from) {
  const __m256 halves[2] = {_mm512_maskz_cvtpd_ps(0xff, (__m512d)from[0]),
                            _mm512_maskz_cvtpd_ps(0xff, (__m512d)from[1])};
  Floats to;
  __builtin_memcpy(&to, halves, sizeof to);
  return to;
}
#elif defined(__AVX2__)
inline void widen(Floats from, Doubles* to) {
  to[0] = (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)from));
  to[1] = (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)from, 1));
}
// To nearest.
inline Floats narrow(const Doubles* from) {
  return (Floats)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)from[1]), _mm256_cvtpd_ps((__m256d)from[0]));
}
#else
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));  // NOLINT: as in reduce_math.h

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
#endif

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

constexpr std::int64_t kBelowFloat = (std::int64_t{1} << 29) - 1;  // the bits of a float64 that no float32 has

// Whether some of them are not zero, and less than a normal float32.
inline Longs tiny(Doubles of) {
  const Doubles size = (Doubles)((Longs)of & (~std::uint64_t{0} >> 1));
  return (size < 0x1p-126) & (size > 0.0);
}

struct ExactFloat32 {
  static constexpr std::size_t kBytes = 4;
  static constexpr bool kNarrows = true;
  static constexpr int kBits = 24;
  static Floats load(const std::byte* from) { return load_vector<float>(from); }
  static void store(std::byte* to, Floats from) { store_vector<float>(to, from); }
  static void store(std::byte* to, const Doubles* from) { store(to, narrow(from)); }

  // The quotient in float32, unless rounding twice could have changed it: if a product with the rounded reciprocal lies
  // next to the middle of two float32.
  static bool divide(const Doubles* sum, const FloatMath<double>::Divisor& by, Floats& to) {
    Doubles quotient[2];
    Longs risky = {};
    for (int i = 0; i < 2; ++i) {
      quotient[i] = sum[i] * by.reciprocal;
      const Longs from_middle = ((Longs)quotient[i] & kBelowFloat) - (kBelowFloat >> 1);
      risky |= ((from_middle > -4) & (from_middle < 5)) | tiny(quotient[i]);
    }
    to = narrow(quotient);
    return by.is_power_of_two || !any(risky);
  }
  static bool narrow_safely(const Doubles* sum, Floats& to) {
    to = narrow(sum);
    return true;
  }
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

// Half: how 16 bits become a float32 and back, and how many of them are a mantissa; kTiny: whether some of its numbers
// are less than a normal float32.
template <typename Half, int kMantissaBits, bool kTiny>
struct ExactHalf {
  static constexpr std::size_t kBytes = 2;
  static constexpr bool kNarrows = true;
  static constexpr int kBits = kMantissaBits;
  static Floats load(const std::byte* from) { return Half::load(from); }
  static void store(std::byte* to, Floats from) { Half::store(to, from); }
  static void store(std::byte* to, const Doubles* from) { store(to, narrow_to_odd(from)); }

  static bool divide(const Doubles* sum, const FloatMath<double>::Divisor& by, Floats& to) {
    Doubles quotient[2];
    Longs risky = {};
    for (int i = 0; i < 2; ++i) {
      quotient[i] = by.is_power_of_two ? sum[i] * by.reciprocal : sum[i] / by.value;
      // Beside a float32, and not one: what is cut off there cannot be seen.
      risky |= (((Longs)quotient[i] & kBelowFloat) == 0) & (quotient[i] * by.value != sum[i]);
    }
    return narrow_safely(quotient, to) && !any(risky);
  }
  // To odd: what a float32 has no room for is cut off, and its last bit set.
  static bool narrow_safely(const Doubles* sum, Floats& to) {
    Doubles odd[2];
    Longs risky = {};
    for (int i = 0; i < 2; ++i) {
      const Longs bits = (Longs)sum[i];
      const Longs sticky = ((bits & kBelowFloat) != 0) & (kBelowFloat + 1);
      odd[i] = (Doubles)((bits & ~kBelowFloat) | sticky);
      if constexpr (kTiny) risky |= tiny(sum[i]);
    }
    to = narrow(odd);
    return !kTiny || !any(risky);
  }
};

// 16 bits by integer operations, in the order of elements.
template <typename Bits>
struct InOrder {
  static Floats load(const std::byte* from) {
    const HalfShorts half = *reinterpret_cast<const HalfShortsAnywhere*>(from);
    return Bits::widen(__builtin_convertvector(half, Words));
  }
  static void store(std::byte* to, Floats from) {
    *reinterpret_cast<HalfShortsAnywhere*>(to) = __builtin_convertvector(Bits::narrow(from), HalfShorts);
  }
};

// 16 bits by the processor, where it takes as many at a time.
template <typename Native>
struct Converted {
  static Floats load(const std::byte* from) {
    Floats to;
    Native::load(from, &to);
    return to;
  }
  static void store(std::byte* to, Floats from) { Native::store(to, &from); }
};

using ExactBfloat16 = ExactHalf<InOrder<Bfloat16Bits>, 8, true>;

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
void load_wide(const std::byte* from, Doubles* to) {
  if constexpr (Element::kNarrows) {
    widen(Element::load(from), to);
  } else {
    Element::load(from, to);
  }
}

// Sources and destinations of a unit: in place, or for the last, incomplete one copies that are filled up with zeros.
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

// One unit, with a look at every addition. All is read before anything is written. `index`: of its first element.
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

// The largest and the smallest of some magnitudes, zeros left out, in each place of the vector.
struct Range {
  Words largest = {};
  Words smallest = Words{} - 1;  // less one: so zero is the largest of all

  void add(Floats values) {
    const Words size = (Words)values & 0x7fffffff;
    largest = largest > size ? largest : size;
    const Words less = size - 1;
    smallest = smallest < less ? smallest : less;
  }
  // Whether a sum of `count` of them may have more bits than there are beyond those of one of them; or is not finite.
  bool exceeds(int room, std::size_t count) const {
    while (count > 1) {
      --room;
      count = (count + 1) / 2;
    }
    if (room < 0) return true;  // so many may have more bits even if all have one exponent
    const Words gap = (largest >> 23) - ((smallest + 1) >> 23);
    const Words bad = (Words)(gap > static_cast<std::uint32_t>(room)) | (Words)(largest >= 0x7f800000);
    return any((Longs)bad);
  }
};

// kUnits units in one go. False, and nothing is written: some element needs a closer look.
template <typename Element, bool kUnroundedResult, std::size_t kUnits>
[[gnu::always_inline]] inline bool add_quickly(const isa::ExactJob& job, std::size_t index,
                                               const FloatMath<double>::Divisor& divisor) {
  Doubles sum[2 * kUnits];
  for (Doubles& one : sum) one = -(Doubles{});  // a negative zero: added to anything, it leaves it alone
  Range range;
  for (std::size_t s = 0; s < job.source_count; ++s) {
    const std::byte* from = job.sources[s] + index * Element::kBytes;
#pragma GCC unroll 8
    for (std::size_t u = 0; u < kUnits; ++u) {
      const Floats values = Element::load(from + u * kExactUnit * Element::kBytes);
      range.add(values);
      Doubles next[2];
      widen(values, next);
      sum[2 * u] += next[0];
      sum[2 * u + 1] += next[1];
    }
  }
  if (range.exceeds(53 - Element::kBits, job.source_count)) return false;
  if constexpr (kUnroundedResult) {
    for (std::size_t d = 0; d < job.destination_count; ++d) {
      std::byte* to = job.destinations[d] + index * ExactFloat64::kBytes;
#pragma GCC unroll 8
      for (std::size_t u = 0; u < kUnits; ++u) {
        ExactFloat64::store(to + u * kExactUnit * ExactFloat64::kBytes, sum + 2 * u);
      }
    }
    return true;
  }
  Floats result[kUnits];
  bool safe = true;
#pragma GCC unroll 8
  for (std::size_t u = 0; u < kUnits; ++u) {
    safe &= job.divisor == 1 ? Element::narrow_safely(sum + 2 * u, result[u])
                             : Element::divide(sum + 2 * u, divisor, result[u]);
  }
  if (!safe) return false;
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* to = job.destinations[d] + index * Element::kBytes;
#pragma GCC unroll 8
    for (std::size_t u = 0; u < kUnits; ++u) Element::store(to + u * kExactUnit * Element::kBytes, result[u]);
  }
  return true;
}

// The same in float32, where that rounds nothing but the result: a sum of two float32 is rounded once, and sums of
// halves mostly fit. Division by a power of two rounds nothing, either.
template <typename Element, std::size_t kUnits>
[[gnu::always_inline]] inline bool add_in_float(const isa::ExactJob& job, std::size_t index, float factor) {
  Floats sum[kUnits];
  for (Floats& one : sum) one = -(Floats{});
  Range range;
  for (std::size_t s = 0; s < job.source_count; ++s) {
    const std::byte* from = job.sources[s] + index * Element::kBytes;
#pragma GCC unroll 8
    for (std::size_t u = 0; u < kUnits; ++u) {
      const Floats values = Element::load(from + u * kExactUnit * Element::kBytes);
      if constexpr (Element::kBits < 24) range.add(values);
      sum[u] += values;
    }
  }
  // No overflow on the way to an average, and no subnormal number where there is a division.
  constexpr std::uint32_t kLeast = (Element::kBits == 24 ? 24 : 48) << 23;
  constexpr std::uint32_t kMost = (Element::kBits == 24 ? 255 : 240) << 23;
  if constexpr (Element::kBits == 24) {
    for (const Floats& one : sum) range.add(one);
  } else if (range.exceeds(24 - Element::kBits, job.source_count)) {
    return false;
  }
  if (any((Longs)((Words)(range.largest >= kMost) | (Words)(range.smallest < kLeast)))) return false;
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* to = job.destinations[d] + index * Element::kBytes;
#pragma GCC unroll 8
    for (std::size_t u = 0; u < kUnits; ++u) Element::store(to + u * kExactUnit * Element::kBytes, sum[u] * factor);
  }
  return true;
}

template <typename Element, bool kUnroundedResult>
void exact_run(const isa::ExactJob& job) {
  constexpr std::size_t kUnits = 4;
  const FloatMath<double>::Divisor divisor(job.divisor);
  bool is_quick = Element::kNarrows;
  for (std::size_t s = 0; s < job.source_count; ++s) is_quick &= !job.unrounded[s];
  const bool divides_exactly = (job.divisor & (job.divisor - 1)) == 0;
  [[maybe_unused]] const bool is_float =
      !kUnroundedResult && is_quick && divides_exactly && (Element::kBytes < 4 || job.source_count == 2);
  [[maybe_unused]] const auto factor = static_cast<float>(divisor.reciprocal);
  std::size_t index = 0;
  while (index + kExactUnit <= job.count) {
    if constexpr (Element::kNarrows) {
      if (is_quick && index + kUnits * kExactUnit <= job.count &&
          ((is_float && add_in_float<Element, kUnits>(job, index, factor)) ||
           add_quickly<Element, kUnroundedResult, kUnits>(job, index, divisor))) {
        index += kUnits * kExactUnit;
        continue;
      }
    }
    // As many as were tried together.
    for (std::size_t u = 0; u < kUnits && index + kExactUnit <= job.count; ++u, index += kExactUnit) {
      add_checked<Element, kUnroundedResult>(job, index, divisor, UnitInPlace<Element>{});
    }
  }
  if (index < job.count) {
    add_checked<Element, kUnroundedResult>(job, index, divisor, UnitOfRest<Element>{job.count - index});
  }
}

template <typename Float16, bool kUnroundedResult>
isa::ExactKernel choose_exact(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return exact_run<ExactFloat32, kUnroundedResult>;
    case Dtype::kFloat64: return exact_run<ExactFloat64, kUnroundedResult>;
    case Dtype::kFloat16: return exact_run<ExactHalf<Float16, 11, false>, kUnroundedResult>;
    case Dtype::kBfloat16: return exact_run<ExactBfloat16, kUnroundedResult>;
    default: return nullptr;
  }
}

template <typename Float16>
isa::ExactKernel choose_exact(Dtype dtype, bool unrounded_result) {
  return unrounded_result ? choose_exact<Float16, true>(dtype) : choose_exact<Float16, false>(dtype);
}

}  // namespace
}  // namespace bps::server
