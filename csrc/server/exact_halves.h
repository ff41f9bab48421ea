// SPDX-License-Identifier: Apache-2.0
// Makes exact sums of 16-bit floats, between bounds in float32. It is only for reduce_avx512.cc, by way of
// exact_directed.h.
#pragma once

#include "server/exact_bounds.h"

namespace bps::server {
namespace {

constexpr std::size_t kHalvesInBlock = 128;
constexpr std::size_t kHalfVectors = kHalvesInBlock / (kVectorBytes / sizeof(float));

// `Half` says how a vector of 64 bytes becomes two of float32, and back.
template <typename Half>
[[gnu::always_inline]] inline void load_halves(const std::byte* from, Floats* to) {
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kHalfVectors; i += 2) Half::load(from + i * kVectorBytes / 2, to + i);
}
template <typename Half>
[[gnu::always_inline]] inline void store_halves(const isa::ExactJob& job, std::size_t index, const Floats* from) {
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* to = job.destinations[d] + index * 2;
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kHalfVectors; i += 2) Half::store(to + i * kVectorBytes / 2, from + i);
  }
}

// Stores the results if both bounds become the same numbers, although they differ. Returns whether they do.
template <typename Half>
[[gnu::noinline]] bool store_if_same(const isa::ExactJob& job, std::size_t index, Bounds<Floats, kHalfVectors>& bounds,
                                     const Divide<Floats>& division, bool is_divided) {
  if (!is_divided) bounds.divide_by(division);
  if (!bounds.unite()) return false;
  for (std::size_t i = 0; i < kHalfVectors; i += 2) {
    std::byte low[kVectorBytes];
    std::byte high[kVectorBytes];
    Half::store(low, bounds.low + i);
    Half::store(high, bounds.high + i);
    if (__builtin_memcmp(low, high, sizeof low) != 0) return false;
  }
  store_halves<Half>(job, index, bounds.high);
  return true;
}

template <typename Half, bool kMayBeTiny, bool kUnroundedResult>
[[gnu::always_inline]] inline bool add_halves(const isa::ExactJob& job, std::size_t index,
                                              const Divide<Floats>& division) {
  Bounds<Floats, kHalfVectors> sum;
  load_halves<Half>(job.sources[0] + index * 2, sum.high);
  sum.begin();
  for (std::size_t s = 1; s < job.source_count; ++s) {
    Floats next[kHalfVectors];
    load_halves<Half>(job.sources[s] + index * 2, next);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kHalfVectors; ++i) {
      sum.low[i] = add_down(sum.low[i], next[i]);
      sum.high[i] = add_up(sum.high[i], next[i]);
    }
  }
  if constexpr (kUnroundedResult) {
    if (sum.are_equal() != kAll<Floats>) return false;
    for (std::size_t d = 0; d < job.destination_count; ++d) {
      std::byte* to = job.destinations[d] + index * sizeof(double);
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kHalfVectors; ++i) {
        Doubles wide[2];
        widen(sum.high[i], wide);
        ExactFloat64::store(to + i * kExactUnit * sizeof(double), wide);
      }
    }
    return true;
  }
  const bool may_become_tiny = kMayBeTiny && division.is_exact && !division.is_one;
  if (may_become_tiny) sum.multiply_by(division.reciprocal);
  if (sum.are_equal() != kAll<Floats>) {
    auto copy = sum;  // a copy lets the compiler keep `sum` in registers
    return store_if_same<Half>(job, index, copy, division, may_become_tiny);
  }
  if (!division.is_exact) {
#pragma GCC unroll 16
    for (Floats& one : sum.high) one = division.to_odd(one);
    if (!are_numbers(sum.high)) return false;
  } else if (!kMayBeTiny) {
#pragma GCC unroll 16
    for (Floats& one : sum.high) one *= division.reciprocal;
  }
  store_halves<Half>(job, index, sum.high);
  return true;
}

}  // namespace
}  // namespace bps::server
