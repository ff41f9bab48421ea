// SPDX-License-Identifier: Apache-2.0
// The exact sum of any float64 numbers: one integer that is wide enough for all of them (Kulisch's long accumulator).
//
// Slow beside an addition, about a tenth of a microsecond: for the elements that a float64 cannot hold. Digits of 32
// bits lie in 64, so that carries wait until the end. At most 2^30 terms. Infinities and NaN are counted: a sum with
// NaN, or with infinities of both signs, is the one NaN that arithmetic makes without an operand's payload.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace bps::server {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// For run_exactly(), where no element is beyond it.
inline double nothing_to_repair(void*, std::size_t) {
  return kNaN;
}

class Superaccumulator {
 public:
  // They reach from 2^-1074 up to 64 bits more than the largest number needs.
  static constexpr std::size_t kDigits = 68;
  // The value as numbers that can be added to those of up to 2^20 other accumulators, in any order, in float64 without
  // rounding: the digits, then how many NaN, infinities, negative infinities, and other than negative zeros.
  static constexpr std::size_t kParts = kDigits + 4;
  // A sum has to be cut into fewer float64 than these: see expand().
  static constexpr std::size_t kMostTerms = 64;

  void add(double value) { add(value, 0); }
  // Adds 2^64 times as much.
  void add_scaled(double value) { add(value, kScaledDigits); }
  void add_parts(std::span<const double, kParts> parts);
  void to_parts(std::span<double, kParts> parts) const;

  enum class Rounding : std::uint8_t { kNearest, kToOdd };
  // The sum divided by `divisor`, which is at least 1, rounded once.
  double value(std::uint32_t divisor, Rounding rounding) const { return value(divisor, rounding, 0); }
  // Numbers of float64 whose sum it is, the largest first; one that is not finite, or zero, is all there is. A sum that
  // is beyond the largest number has a first one that stands for 2^64 times as much: that is `is_first_scaled`.
  std::size_t expand(std::span<double, kMostTerms> terms, bool& is_first_scaled) const;

 private:
  static constexpr std::size_t kScaledDigits = 2;  // of the highest number, the last ones there are
  void add(double value, std::size_t above);
  // 2^`scale` times as much.
  double value(std::uint32_t divisor, Rounding rounding, int scale) const;
  bool is_finite() const { return nans_ == 0 && infinities_ == 0 && negative_infinities_ == 0; }

  struct Magnitude;
  std::array<std::int64_t, kDigits> digits_{};
  std::uint32_t nans_ = 0;
  std::uint32_t infinities_ = 0;
  std::uint32_t negative_infinities_ = 0;
  std::uint32_t others_ = 0;  // than negative zeros
};

}  // namespace bps::server
