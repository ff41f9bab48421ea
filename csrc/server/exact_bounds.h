// SPDX-License-Identifier: Apache-2.0
// Offers arithmetic that rounds as it is told to, one operation at a time, and bounds of sums made with it. It is only
// for reduce_avx512.cc, by way of exact_directed.h, which says what for.
#pragma once

#include "server/exact_units.h"

namespace bps::server {
namespace {

constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;

// These have masks of all ones, as in reduce_avx512.cc. Upwards they multiply with one and then add: that is done by
// other units of the processor than additions.
inline Floats add_down(Floats a, Floats b) {
  return (Floats)_mm512_maskz_add_round_ps(0xffff, (__m512)a, (__m512)b, kDown);
}
inline Floats add_up(Floats a, Floats b) {
  return (Floats)_mm512_maskz_fmadd_round_ps(0xffff, (__m512)b, (__m512)(Floats{} + 1.0F), (__m512)a, kUp);
}
inline Doubles add_down(Doubles a, Doubles b) {
  return (Doubles)_mm512_maskz_add_round_pd(0xff, (__m512d)a, (__m512d)b, kDown);
}
inline Doubles add_up(Doubles a, Doubles b) {
  return (Doubles)_mm512_maskz_fmadd_round_pd(0xff, (__m512d)b, (__m512d)(Doubles{} + 1.0), (__m512d)a, kUp);
}
template <int kWay>
Floats multiply(Floats a, Floats b) {
  return (Floats)_mm512_maskz_mul_round_ps(0xffff, (__m512)a, (__m512)b, kWay);
}
template <int kWay>
Doubles multiply(Doubles a, Doubles b) {
  return (Doubles)_mm512_maskz_mul_round_pd(0xff, (__m512d)a, (__m512d)b, kWay);
}
template <int kWay>
Floats divide(Floats a, Floats b) {
  return (Floats)_mm512_maskz_div_round_ps(0xffff, (__m512)a, (__m512)b, kWay);
}
template <int kWay>
Doubles divide(Doubles a, Doubles b) {
  return (Doubles)_mm512_maskz_div_round_pd(0xff, (__m512d)a, (__m512d)b, kWay);
}
// These return a * b + c, rounded once, to nearest.
inline Floats fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_maskz_fmadd_ps(0xffff, (__m512)a, (__m512)b, (__m512)c);
}
inline Doubles fused(Doubles a, Doubles b, Doubles c) {
  return (Doubles)_mm512_maskz_fmadd_pd(0xff, (__m512d)a, (__m512d)b, (__m512d)c);
}

// These return a bit for each place where both are equal, and none where one is NaN.
inline std::uint32_t equal(Floats a, Floats b, std::uint32_t among = 0xffff) {
  return _mm512_mask_cmp_ps_mask(static_cast<__mmask16>(among), (__m512)a, (__m512)b, _CMP_EQ_OQ);
}
inline std::uint32_t equal(Doubles a, Doubles b, std::uint32_t among = 0xff) {
  return _mm512_mask_cmp_pd_mask(static_cast<__mmask8>(among), (__m512d)a, (__m512d)b, _CMP_EQ_OQ);
}
inline Floats choose_by(std::uint32_t mask, Floats yes, Floats no) {
  return (Floats)_mm512_mask_mov_ps((__m512)no, static_cast<__mmask16>(mask), (__m512)yes);
}
inline Doubles choose_by(std::uint32_t mask, Doubles yes, Doubles no) {
  return (Doubles)_mm512_mask_mov_pd((__m512d)no, static_cast<__mmask8>(mask), (__m512d)yes);
}
template <typename V>
constexpr std::uint32_t kAll = sizeof(V{}[0]) == 4 ? 0xffff : 0xff;

template <typename V>
struct Divide {
  using T = decltype(V{}[0] + V{}[0]);
  explicit Divide(std::uint32_t divisor)
      : by(V{} + static_cast<T>(divisor)),
        reciprocal(T{1} / by),
        is_one(divisor == 1),
        is_exact((divisor & (divisor - 1)) == 0) {}
  V by;
  V reciprocal;
  bool is_one;
  bool is_exact;  // the divisor is a power of two, which rounds only what becomes subnormal

  // Rounds the quotient to odd: it is truncated, and the last bit says whether anything was cut off. Its product with
  // the divisor, which has at most 21 bits, and the difference to the sum are exact. That difference is a multiple of
  // the last place of the quotient, and less than the divisor times two of these. Infinities become NaN.
  V to_odd(V sum) const {
    const V near = sum * reciprocal;  // this is up to two places off, and `nearest` less than one
    const V nearest = fused(fused(-near, by, sum), reciprocal, near);
    const V rest = fused(-nearest, by, sum);
    using Bits = decltype(rest < rest);
    const Bits is_off = rest != V{};
    const Bits is_beyond = (((Bits)rest ^ (Bits)sum) < 0) & is_off;  // the comparison is all ones, minus one
    const Bits sign = (Bits)sum & (Bits)(-V{});
    return (V)(((Bits)nearest + is_beyond) | (is_off & 1) | sign);
  }
};

// Keeps bounds of what is added, `kCount` vectors at a time. Both begin as the first source. So the upper bound stays a
// negative zero if nothing else is added; upwards, x - x is positive. The lower bound may be the other zero.
template <typename V, std::size_t kCount>
struct Bounds {
  V low[kCount];
  V high[kCount];

  void begin() {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) low[i] = high[i];
  }
  std::uint32_t are_equal() const {
    std::uint32_t found = kAll<V>;
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) found = equal(low[i], high[i], found);
    return found;
  }
  // Multiplies by a power of two. What is cut off makes the bounds differ.
  void multiply_by(V factor) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) {
      low[i] = multiply<kDown>(low[i], factor);
      high[i] = multiply<kUp>(high[i], factor);
    }
  }
  void divide_by(const Divide<V>& division) {
    if (division.is_exact) return multiply_by(division.reciprocal);
    for (std::size_t i = 0; i < kCount; ++i) {
      low[i] = divide<kDown>(low[i], division.by);
      high[i] = divide<kUp>(high[i], division.by);
    }
  }
  // Makes bounds that are equal the same, zeros as well. Returns false where one is NaN.
  bool unite() {
    bool is_number = true;
    for (std::size_t i = 0; i < kCount; ++i) {
      is_number &= (equal(low[i], low[i]) & equal(high[i], high[i])) == kAll<V>;
      low[i] = choose_by(equal(low[i], high[i]), high[i], low[i]);
    }
    return is_number;
  }
};

// Returns true where none of them is NaN.
template <typename V, std::size_t kCount>
bool are_numbers(const V (&values)[kCount]) {
  std::uint32_t found = kAll<V>;
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kCount; ++i) found = equal(values[i], values[i], found);
  return found == kAll<V>;
}

}  // namespace
}  // namespace bps::server
