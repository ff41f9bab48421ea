// SPDX-License-Identifier: Apache-2.0
// Holds the exact sum of any float64 numbers in one integer that is wide enough for all of them (Kulisch's long
// accumulator).
//
// It takes about a tenth of a microsecond for a term, which is slow beside an addition. So it is for elements that a
// float64 cannot hold. Digits of 32 bits lie in 64, so that carries wait until the end. There are at most 2^30 terms.
// Infinities and NaN are counted: a sum with NaN, or with infinities of both signs, is the one NaN that arithmetic
// makes without an operand's payload.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace bps::server {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Repairs nothing, for run_exactly() where no element needs that.
inline double nothing_to_repair(void*, std::size_t) {
  return kNaN;
}

class Superaccumulator {
 public:
  // The digits reach from 2^-1074 up to 64 bits more than the largest number needs.
  static constexpr std::size_t kDigits = 68;
  // The parts of a value are numbers that can be added to those of up to 2^20 other accumulators, in any order, in
  // float64 without rounding. They are the digits, then how many terms were NaN, infinities, negative infinities, and
  // other than negative zeros.
  static constexpr std::size_t kParts = kDigits + 4;
  // A sum is cut into fewer float64 than these: see expand().
  static constexpr std::size_t kMostTerms = 64;

  void add(double value) { add(value, 0); }
  // Adds 2^64 times the value.
  void add_scaled(double value) { add(value, kScaledDigits); }
  void add_parts(std::span<const double, kParts> parts);
  void to_parts(std::span<double, kParts> parts) const;

  enum class Rounding : std::uint8_t { kNearest, kToOdd };
  // Returns the sum divided by `divisor`, which is at least 1, rounded once.
  double value(std::uint32_t divisor, Rounding rounding) const { return value(divisor, rounding, 0); }
  // Writes float64 numbers that add up to the sum, the largest first, and returns how many. A sum that is zero or not
  // finite is one number. `is_first_scaled` says that the first number stands for 2^64 times as much, because the sum
  // is beyond the largest float64.
  std::size_t expand(std::span<double, kMostTerms> terms, bool& is_first_scaled) const;

 private:
  static constexpr std::size_t kScaledDigits = 2;  // the highest number reaches the last digits there are
  void add(double value, std::size_t above);
  // Returns 2^`scale` times as much.
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
