// SPDX-License-Identifier: Apache-2.0
// Makes exact sums of float32 and float64 in the type itself, where the sums may be longer than it. It is only for
// reduce_avx512.cc, by way of exact_directed.h.
#pragma once

#include <type_traits>

#include "server/exact_bounds.h"

namespace bps::server {
namespace {

// ---- Two sources of the type itself: their sum is rounded once, by the addition

constexpr std::size_t kLongVectors = 4;
template <typename T>
constexpr std::size_t kLongsInBlock = kLongVectors * kVectorBytes / sizeof(T);

// These return a bit for each place where a quotient may be wrong: it is subnormal, and may have been rounded once
// more; it is infinite, and the sum may have been so alone; or it is NaN.
constexpr int kNotNormal = 0x01 | 0x08 | 0x10 | 0x20 | 0x80;  // NaN, infinities, subnormal numbers, NaN that signals
inline std::uint32_t is_odd(Floats quotient) {
  return _mm512_fpclass_ps_mask((__m512)quotient, kNotNormal);
}
inline std::uint32_t is_odd(Doubles quotient) {
  return _mm512_fpclass_pd_mask((__m512d)quotient, kNotNormal);
}

template <typename T>
[[gnu::always_inline]] inline bool add_two(const isa::ExactJob& job, std::size_t index,
                                           const Divide<Vector<T>>& division) {
  using V = Vector<T>;
  constexpr std::size_t kCount = kLongVectors;
  V sum[kCount];
  std::uint32_t good = kAll<V>;
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::size_t at = index * sizeof(T) + i * kVectorBytes;
    sum[i] = load_vector<T>(job.sources[0] + at) + load_vector<T>(job.sources[1] + at);
  }
  if (division.is_one) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) good = equal(sum[i], sum[i], good);
  } else {
    std::uint32_t odd = 0;
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) {
      sum[i] *= division.reciprocal;
      odd |= is_odd(sum[i]);
    }
    good &= ~odd;
  }
  if (good != kAll<V>) return false;
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* to = job.destinations[d] + index * sizeof(T);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) store_vector<T>(to + i * kVectorBytes, sum[i]);
  }
  return true;
}

// ---- Sums that are longer than the type, with what each addition cuts off (Knuth 1997, 4.2.2), added between bounds

// These add and subtract by the units that multiply, as in add_up(), so that these units do half of the work.
inline Floats plus(Floats a, Floats b) {
  return (Floats)_mm512_maskz_fmadd_ps(0xffff, (__m512)a, (__m512)(Floats{} + 1.0F), (__m512)b);
}
inline Floats minus(Floats a, Floats b) {
  return (Floats)_mm512_maskz_fmsub_ps(0xffff, (__m512)a, (__m512)(Floats{} + 1.0F), (__m512)b);
}
inline Doubles plus(Doubles a, Doubles b) {
  return (Doubles)_mm512_maskz_fmadd_pd(0xff, (__m512d)a, (__m512d)(Doubles{} + 1.0), (__m512d)b);
}
inline Doubles minus(Doubles a, Doubles b) {
  return (Doubles)_mm512_maskz_fmsub_pd(0xff, (__m512d)a, (__m512d)(Doubles{} + 1.0), (__m512d)b);
}

inline Floats plus_down(Floats a, Floats b) {
  return (Floats)_mm512_maskz_fmadd_round_ps(0xffff, (__m512)a, (__m512)(Floats{} + 1.0F), (__m512)b, kDown);
}
inline Doubles plus_down(Doubles a, Doubles b) {
  return (Doubles)_mm512_maskz_fmadd_round_pd(0xff, (__m512d)a, (__m512d)(Doubles{} + 1.0), (__m512d)b, kDown);
}

// Adds the next term to the sum, and returns what that cuts off. If that is nothing, it is a zero that leaves the sum
// alone, even if the sum is a negative zero.
template <typename V>
[[gnu::always_inline]] inline V add_and_cut(V& sum, const std::byte* from) {
  V next = load_vector<std::remove_cvref_t<decltype(V{}[0])>>(from);
  asm("" : "+v"(next));  // without this gcc reads it twice
  const V both = sum + next;
  const V of_next = both - sum;
  const V cut = plus_down(minus(sum, both - of_next), minus(next, of_next));
  sum = both;
  return cut;
}

template <typename T>
[[gnu::always_inline]] inline bool add_long(const isa::ExactJob& job, std::size_t index,
                                            const Divide<Vector<T>>& division) {
  using V = Vector<T>;
  constexpr std::size_t kCount = kLongVectors;
  V sum[kCount];
  Bounds<V, kCount> rest;
  const std::size_t at = index * sizeof(T);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kCount; ++i) {
    sum[i] = load_vector<T>(job.sources[0] + at + i * kVectorBytes);
    rest.high[i] = add_and_cut(sum[i], job.sources[1] + at + i * kVectorBytes);
  }
  rest.begin();
  for (std::size_t s = 2; s < job.source_count; ++s) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) {
      const V cut = add_and_cut(sum[i], job.sources[s] + at + i * kVectorBytes);
      rest.low[i] = add_down(rest.low[i], cut);
      rest.high[i] = add_up(rest.high[i], cut);
    }
  }
  std::uint32_t good = kAll<V>;
  if (division.is_exact) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) {
      const V high = plus(sum[i], rest.high[i]);
      sum[i] += rest.low[i];
      good = equal(sum[i], high, good);
    }
  } else {
    // `near` is a quotient that is not far off. `left` is what is left of the sum then, and exact; all that was cut off
    // is added to it.
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) {
      const V near = sum[i] * division.reciprocal;
      const V left = fused(-near, division.by, sum[i]);
      const V high = near + divide<kUp>(add_up(left, rest.high[i]), division.by);
      sum[i] = near + divide<kDown>(add_down(left, rest.low[i]), division.by);
      good = equal(sum[i], high, good);
    }
  }
  if (division.is_exact && !division.is_one) {
    std::uint32_t odd = 0;
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) {
      sum[i] *= division.reciprocal;
      odd |= is_odd(sum[i]);
    }
    good &= ~odd;
  }
  if (good != kAll<V>) return false;
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* to = job.destinations[d] + at;
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) store_vector<T>(to + i * kVectorBytes, sum[i]);
  }
  return true;
}

}  // namespace
}  // namespace bps::server
