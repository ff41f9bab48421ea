// SPDX-License-Identifier: Apache-2.0
// Makes exact sums of all types, between bounds in float64. It is only for reduce_avx512.cc, by way of
// exact_directed.h.
#pragma once

#include "server/exact_bounds.h"

namespace bps::server {
namespace {

constexpr std::size_t kDoublesInBlock = 64;
constexpr std::size_t kDoubleVectors = kDoublesInBlock / kDoublesInVector;
using DoubleBounds = Bounds<Doubles, kDoubleVectors>;

template <typename Element>
[[gnu::always_inline]] inline void load_doubles(const isa::ExactJob& job, std::size_t source, std::size_t index,
                                                Doubles* to) {
  const std::byte* from = job.sources[source];
  if (job.unrounded[source] || Element::kBytes == sizeof(double)) {
    from += index * sizeof(double);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kDoubleVectors; ++i) to[i] = load_vector<double>(from + i * kVectorBytes);
    return;
  }
  from += index * Element::kBytes;
  if constexpr (Element::kBytes == sizeof(float)) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kDoubleVectors; ++i) {
      const auto* at = reinterpret_cast<const float*>(from + i * kVectorBytes / 2);
      to[i] = (Doubles)_mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(at));
    }
  } else if constexpr (Element::kBytes == 2) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kDoubleVectors; i += 2) {
      widen(Element::load(from + i * kDoublesInVector * Element::kBytes), to + i);
    }
  }
}

// Returns false where it is not certain what the sums become.
template <typename Element>
[[gnu::always_inline]] inline bool narrow_block(const Doubles* from, Floats* to) {
  bool safe = true;
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kDoubleVectors; i += 2) safe &= Element::narrow_safely(from + i, to[i / 2]);
  return safe;
}

template <typename Element>
[[gnu::always_inline]] inline void store_block(const isa::ExactJob& job, std::size_t index, const Floats* from) {
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* to = job.destinations[d] + index * Element::kBytes;
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kDoubleVectors / 2; ++i) Element::store(to + i * kExactUnit * Element::kBytes, from[i]);
  }
}

[[gnu::always_inline]] inline void store_doubles(const isa::ExactJob& job, std::size_t index, const Doubles* from) {
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* to = job.destinations[d] + index * sizeof(double);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kDoubleVectors; ++i) store_vector<double>(to + i * kVectorBytes, from[i]);
  }
}

template <typename Element>
[[gnu::noinline]] bool store_if_same(const isa::ExactJob& job, std::size_t index, DoubleBounds& bounds,
                                     const Divide<Doubles>& division) {
  bounds.divide_by(division);
  Floats low[kDoubleVectors / 2];
  Floats high[kDoubleVectors / 2];
  if (!bounds.unite() || !narrow_block<Element>(bounds.low, low) || !narrow_block<Element>(bounds.high, high)) {
    return false;
  }
  std::byte bytes[2][kDoublesInBlock * Element::kBytes];
  for (std::size_t i = 0; i < kDoubleVectors / 2; ++i) {
    Element::store(bytes[0] + i * kExactUnit * Element::kBytes, low[i]);
    Element::store(bytes[1] + i * kExactUnit * Element::kBytes, high[i]);
  }
  if (__builtin_memcmp(bytes[0], bytes[1], sizeof bytes[0]) != 0) return false;
  store_block<Element>(job, index, high);
  return true;
}

template <typename Element, bool kUnroundedResult>
[[gnu::always_inline]] inline bool add_doubles(const isa::ExactJob& job, std::size_t index,
                                               const Divide<Doubles>& division) {
  DoubleBounds sum;
  load_doubles<Element>(job, 0, index, sum.high);
  sum.begin();
  for (std::size_t s = 1; s < job.source_count; ++s) {
    Doubles next[kDoubleVectors];
    load_doubles<Element>(job, s, index, next);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kDoubleVectors; ++i) {
      sum.low[i] = add_down(sum.low[i], next[i]);
      sum.high[i] = add_up(sum.high[i], next[i]);
    }
  }
  if constexpr (kUnroundedResult) {
    if (sum.are_equal() != kAll<Doubles>) return false;
    store_doubles(job, index, sum.high);
    return true;
  } else if constexpr (!Element::kNarrows) {
    if (sum.are_equal() != kAll<Doubles>) return false;
    if (!division.is_one && division.is_exact) {
      sum.multiply_by(division.reciprocal);
      if (sum.are_equal() != kAll<Doubles>) return false;
    } else if (!division.is_one) {
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kDoubleVectors; ++i) sum.high[i] /= division.by;
    }
    store_doubles(job, index, sum.high);
    return true;
  } else {
    if (sum.are_equal() != kAll<Doubles>) {
      auto copy = sum;  // a copy lets the compiler keep `sum` in registers
      return store_if_same<Element>(job, index, copy, division);
    }
    if (!division.is_exact) {
#pragma GCC unroll 16
      for (Doubles& one : sum.high) one = division.to_odd(one);
      if (!are_numbers(sum.high)) return false;
    } else if (!division.is_one) {
#pragma GCC unroll 16
      for (Doubles& one : sum.high) one *= division.reciprocal;
    }
    Floats result[kDoubleVectors / 2];
    if (!narrow_block<Element>(sum.high, result)) return false;
    store_block<Element>(job, index, result);
    return true;
  }
}

}  // namespace
}  // namespace bps::server
