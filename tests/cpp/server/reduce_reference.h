// SPDX-License-Identifier: Apache-2.0
// Computes what reduce() should, written for clearness and by other means: scalars, frexp and nearbyint.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/dtype.h"

namespace bps::server::testing {

// Holds the bits of a binary16 or bfloat16.
template <int kMantissaBits, int kMinExponent>
struct Half {
  std::uint16_t bits;

  static constexpr int kMaxExponent = 1 - kMinExponent;

  static Half from(double value) {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
    const std::uint32_t infinity = ((1U << (15 - kMantissaBits)) - 1) << kMantissaBits;
    if (std::isnan(value)) return {static_cast<std::uint16_t>(sign | infinity | (1U << (kMantissaBits - 1)))};
    if (value == 0) return {sign};
    int exponent = 0;
    std::frexp(value, &exponent);
    const int quantum = std::max(exponent - 1, kMinExponent) - kMantissaBits;
    const double steps = std::nearbyint(std::ldexp(std::fabs(value), -quantum));  // rounds ties to even
    const double rounded = std::ldexp(steps, quantum);
    if (rounded >= std::ldexp(1.0, kMaxExponent + 1)) return {static_cast<std::uint16_t>(sign | infinity)};
    // Bits of neighbours are consecutive integers: count the steps from the start of this power of two.
    const int field = quantum + kMantissaBits - kMinExponent;
    const auto magnitude = static_cast<std::uint32_t>(field * (1 << kMantissaBits) + static_cast<int>(steps));
    return {static_cast<std::uint16_t>(sign | magnitude)};
  }
  float value() const {
    const int field = (bits & 0x7fff) >> kMantissaBits;
    const int mantissa = bits & ((1 << kMantissaBits) - 1);
    double magnitude = 0;
    if (field == (1 << (15 - kMantissaBits)) - 1) {
      magnitude = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else if (field == 0) {
      magnitude = std::ldexp(mantissa, kMinExponent - kMantissaBits);
    } else {
      magnitude = std::ldexp(mantissa + (1 << kMantissaBits), kMinExponent + field - 1 - kMantissaBits);
    }
    return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
  }
};
using Float16 = Half<10, -14>;
using Bfloat16 = Half<7, -126>;

struct Bool {
  std::uint8_t value;
};

template <typename A>
A apply_float(ReduceOp op, A a, A b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage: return a + b;
    case ReduceOp::kMin: return std::isnan(a) || std::isnan(b) ? a + b : b <= a ? b : a;
    case ReduceOp::kMax: return std::isnan(a) || std::isnan(b) ? a + b : b >= a ? b : a;
    case ReduceOp::kProduct: return a * b;
    default: break;
  }
  return a;
}

// Returns the largest number whose product with the divisor is no larger than the sum.
template <typename T>
T floor_of_mean(std::uint32_t divisor, const std::vector<T>& values) {
  __extension__ using Wide = __int128;
  Wide sum = 0;
  for (const T value : values) sum += value;
  Wide mean = sum / divisor;
  while (mean * divisor > sum) --mean;
  return static_cast<T>(mean);
}

// Reduces one element of every source, in order.
template <typename T>
T reduce_one(ReduceOp op, std::uint32_t divisor, const std::vector<T>& values) {
  if constexpr (std::is_same_v<T, Bool>) {
    if (values.size() == 1) return values[0];  // bytes are copied as they are
    bool all = true;
    bool any = false;
    for (const Bool& value : values) {
      all = all && value.value != 0;
      any = any || value.value != 0;
    }
    return {static_cast<std::uint8_t>(op == ReduceOp::kMin || op == ReduceOp::kProduct ? all : any)};
  } else if constexpr (std::is_floating_point_v<T>) {
    T sum = values[0];
    for (std::size_t i = 1; i < values.size(); ++i) sum = apply_float(op, sum, values[i]);
    return op == ReduceOp::kAverage ? sum / static_cast<T>(divisor) : sum;
  } else if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kAverage && divisor > 1) return floor_of_mean(divisor, values);
    std::uint64_t sum = static_cast<std::uint64_t>(values[0]);
    for (std::size_t i = 1; i < values.size(); ++i) {
      const auto next = static_cast<std::uint64_t>(values[i]);
      const auto a = static_cast<T>(sum);
      if (op == ReduceOp::kMin) sum = static_cast<std::uint64_t>(a < values[i] ? a : values[i]);
      if (op == ReduceOp::kMax) sum = static_cast<std::uint64_t>(a < values[i] ? values[i] : a);
      if (op == ReduceOp::kProduct) sum *= next;
      if (op == ReduceOp::kSum || op == ReduceOp::kAverage) sum += next;
    }
    return static_cast<T>(sum);
  } else {
    std::vector<float> wide;
    for (const T& value : values) wide.push_back(value.value());
    return values.size() == 1 && op != ReduceOp::kAverage ? values[0] : T::from(reduce_one(op, divisor, wide));
  }
}

template <typename T>
bool same(const T& a, const T& b) {
  if (std::memcmp(&a, &b, sizeof a) == 0) return true;
  if constexpr (std::is_floating_point_v<T>) return std::isnan(a) && std::isnan(b);
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>) {
    return std::isnan(a.value()) && std::isnan(b.value());
  }
  return false;
}

}  // namespace bps::server::testing
