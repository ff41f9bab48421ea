// SPDX-License-Identifier: Apache-2.0
// Defines the element types of exact sums: how they become float64 and back. It is only for reduce_<isa>.cc; see
// reduce_math.h for the rules.
//
// Types that are narrower than float64 are divided and narrowed by way of "rounding to odd" (the last bit says whether
// anything was cut off), after which the last rounding is that of the exact value (Boldo and Melquiond, 2008). A plain
// rounding is taken instead where it cannot go wrong.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <type_traits>

#include "server/reduce_kernels.h"

namespace bps::server {
namespace {

using Doubles = Vector<double>;
using Longs = Vector<std::int64_t>;

constexpr std::size_t kDoublesInVector = kVectorBytes / sizeof(double);
// Loops work on so many elements together: a vector of float32, which two of float64 hold.
constexpr std::size_t kExactUnit = 2 * kDoublesInVector;

typedef std::uint16_t HalfShorts __attribute__((vector_size(kVectorBytes / 2)));  // NOLINT
typedef HalfShorts HalfShortsAnywhere __attribute__((aligned(1), may_alias));     // NOLINT

#if defined(__AVX512BW__)
inline bool any(Longs mask) {
  return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
}
#elif defined(__AVX2__)
inline bool any(Longs mask) {
  return _mm256_testz_si256((__m256i)mask, (__m256i)mask) == 0;
}
#else
inline bool any(Longs mask) {
  std::int64_t lanes[kDoublesInVector];
  __builtin_memcpy(lanes, &mask, sizeof lanes);
  std::int64_t found = 0;
  for (const std::int64_t lane : lanes) found |= lane;
  return found != 0;
}
#endif

// gcc 12 converts a vector of AVX2 or AVX-512 in pieces, unless it is told the instruction. The mask is all ones, for
// the reason that reduce_avx512.cc gives.
#if defined(__AVX512BW__)
inline void widen(Floats from, Doubles* to) {
  __m256 halves[2];
  __builtin_memcpy(halves, &from, sizeof from);
  to[0] = (Doubles)_mm512_maskz_cvtps_pd(0xff, halves[0]);
  to[1] = (Doubles)_mm512_maskz_cvtps_pd(0xff, halves[1]);
}
// Rounds to nearest.
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
// Rounds to nearest.
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
// Rounds to nearest.
inline Floats narrow(const Doubles* from) {
  const HalfFloats halves[2] = {__builtin_convertvector(from[0], HalfFloats),
                                __builtin_convertvector(from[1], HalfFloats)};
  Floats to;
  __builtin_memcpy(&to, halves, sizeof to);
  return to;
}
#endif

// Rounds to odd: what was cut off leaves the last bit set, so that rounding once more, to fewer bits, knows of it.
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

// Finds the values that are not zero, and less than a normal float32.
inline Longs tiny(Doubles values) {
  const Doubles size = (Doubles)((Longs)values & (~std::uint64_t{0} >> 1));
  return (size < 0x1p-126) & (size > 0.0);
}

struct ExactFloat32 {
  static constexpr std::size_t kBytes = 4;
  static constexpr bool kNarrows = true;
  static constexpr int kBits = 24;
  static Floats load(const std::byte* from) { return load_vector<float>(from); }
  static void store(std::byte* to, Floats from) { store_vector<float>(to, from); }
  static void store(std::byte* to, const Doubles* from) { store(to, narrow(from)); }

  // Makes the quotient in float32. Returns false where rounding twice could have changed it, because a product with the
  // rounded reciprocal lies next to the middle of two float32.
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

// `Half` says how 16 bits become a float32 and back, and kMantissaBits how many of them are the mantissa. kTiny says
// whether some of its numbers are less than a normal float32.
template <typename Half, int kMantissaBits, bool kTiny>
struct ExactHalf {
  static constexpr std::size_t kBytes = 2;
  static constexpr bool kMayBeTiny = kTiny;
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
      // The quotient lies beside a float32, and is not one: what is cut off there cannot be seen.
      risky |= (((Longs)quotient[i] & kBelowFloat) == 0) & (quotient[i] * by.value != sum[i]);
    }
    return narrow_safely(quotient, to) && !any(risky);
  }
  // Rounds to odd: what a float32 has no room for is cut off, and its last bit set.
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

// Converts 16 bits by integer operations, in the order of elements.
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

// Converts 16 bits by instructions of the processor, where these take as many at a time.
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

// Loads and stores two vectors of float32 at once, in the order of elements.
template <typename Element>
struct InTurn {
  static constexpr std::size_t kBytes = kExactUnit * Element::kBytes;
  static void load(const std::byte* from, Floats* to) {
    to[0] = Element::load(from);
    to[1] = Element::load(from + kBytes);
  }
  static void store(std::byte* to, const Floats* from) {
    Element::store(to, from[0]);
    Element::store(to + kBytes, from[1]);
  }
};
// Does so in any order, where that is faster.
template <typename Element>
using Pairs = std::conditional_t<std::is_same_v<Element, ExactBfloat16>, Paired<Bfloat16Bits>, InTurn<Element>>;

}  // namespace
}  // namespace bps::server
