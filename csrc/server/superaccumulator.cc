// SPDX-License-Identifier: Apache-2.0
#include "server/superaccumulator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace bps::server {
namespace {

constexpr int kMantissaBits = 52;
constexpr std::uint64_t kHidden = std::uint64_t{1} << kMantissaBits;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

// Holds the sum without its sign, with digits below 2^-1074 for what a division leaves.
struct Superaccumulator::Magnitude {
  static constexpr std::size_t kBelow = 2;
  std::array<std::uint32_t, kDigits + kBelow> digits{};
  bool is_negative = false;
  bool has_rest = false;  // something less than the last digit is left

  explicit Magnitude(const std::array<std::int64_t, kDigits>& from) {
    is_negative = carry(from, 1) < 0;
    if (is_negative) carry(from, -1);
  }
  void divide(std::uint32_t divisor) {
    std::uint64_t rest = 0;
    for (std::size_t i = digits.size(); i-- > 0;) {
      rest = rest << 32 | digits[i];
      digits[i] = static_cast<std::uint32_t>(rest / divisor);
      rest %= divisor;
    }
    has_rest = rest != 0;
  }
  // Returns the number of the highest bit that is set, counted from the lowest digit; -1: none is.
  int highest() const {
    for (std::size_t i = digits.size(); i-- > 0;) {
      if (digits[i] != 0) return static_cast<int>(i) * 32 + 31 - std::countl_zero(digits[i]);
    }
    return -1;
  }
  std::uint64_t bits(int from, int count) const {
    std::uint64_t found = 0;
    for (int i = from + count; i-- > from;) found = found << 1 | (digits[i / 32] >> (i % 32) & 1);
    return found;
  }
  bool any_below(int bit) const {
    for (int i = 0; i < bit / 32; ++i) {
      if (digits[i] != 0) return true;
    }
    return has_rest || (bit % 32 != 0 && digits[bit / 32] << (32 - bit % 32) != 0);
  }

 private:
  // Returns the carry out of the highest digit, which is negative if the number is.
  std::int64_t carry(const std::array<std::int64_t, kDigits>& from, std::int64_t sign) {
    std::int64_t over = 0;
    for (std::size_t i = 0; i < kDigits; ++i) {
      const std::int64_t digit = sign * from[i] + over;
      digits[i + kBelow] = static_cast<std::uint32_t>(digit);
      over = digit >> 32;
    }
    return over;
  }
};

void Superaccumulator::add(double value, std::size_t above) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const bool is_negative = bits >> 63 != 0;
  const auto exponent = static_cast<int>(bits >> kMantissaBits & 0x7ff);
  const std::uint64_t fraction = bits & (kHidden - 1);
  if (bits != std::uint64_t{1} << 63) ++others_;
  if (exponent == 0x7ff) {
    ++(fraction != 0 ? nans_ : is_negative ? negative_infinities_ : infinities_);
    return;
  }
  const std::uint64_t mantissa = exponent == 0 ? fraction : fraction | kHidden;
  const int place = exponent == 0 ? 0 : exponent - 1;  // that of its last bit, above 2^-1074
  const std::int64_t sign = is_negative ? -1 : 1;
  const int shift = place % 32;
  const std::uint64_t low = mantissa << shift;  // the lower 64 of 84 bits
  const std::uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
  std::int64_t* digit = digits_.data() + static_cast<std::size_t>(place / 32) + above;
  digit[0] += sign * static_cast<std::int64_t>(low & 0xffffffff);
  digit[1] += sign * static_cast<std::int64_t>(low >> 32);
  digit[2] += sign * static_cast<std::int64_t>(high);
}

void Superaccumulator::to_parts(std::span<double, kParts> parts) const {
  const Magnitude magnitude(digits_);
  const double sign = magnitude.is_negative ? -1 : 1;
  for (std::size_t i = 0; i < kDigits; ++i) parts[i] = sign * magnitude.digits[i + Magnitude::kBelow];
  const std::uint32_t counts[] = {nans_, infinities_, negative_infinities_, others_};
  for (std::size_t i = 0; i < std::size(counts); ++i) parts[kDigits + i] = counts[i];
}

void Superaccumulator::add_parts(std::span<const double, kParts> parts) {
  for (std::size_t i = 0; i < kDigits; ++i) digits_[i] += static_cast<std::int64_t>(parts[i]);
  std::uint32_t* const counts[] = {&nans_, &infinities_, &negative_infinities_, &others_};
  for (std::size_t i = 0; i < std::size(counts); ++i) *counts[i] += static_cast<std::uint32_t>(parts[kDigits + i]);
}

double Superaccumulator::value(std::uint32_t divisor, Rounding rounding, int scale) const {
  if (nans_ > 0 || (infinities_ > 0 && negative_infinities_ > 0)) return kNaN;
  if (infinities_ > 0) return kInfinity;
  if (negative_infinities_ > 0) return -kInfinity;
  Magnitude magnitude(digits_);
  if (divisor > 1) magnitude.divide(divisor);
  const int highest = magnitude.highest();
  constexpr int kLowest = 32 * static_cast<int>(Magnitude::kBelow);  // the bit that stands for 2^-1074
  if (highest < 0 && !magnitude.has_rest) return others_ == 0 ? -0.0 : 0.0;
  // This is the last bit that a float64 of this size has. Subnormal ones have fewer bits.
  const int last = std::max(highest - kMantissaBits, kLowest);
  std::uint64_t kept = highest < last ? 0 : magnitude.bits(last, highest - last + 1);
  const bool half = (magnitude.digits[(last - 1) / 32] >> ((last - 1) % 32) & 1) != 0;
  const bool rest = magnitude.any_below(last - 1);
  if (rounding == Rounding::kToOdd) {
    kept |= static_cast<std::uint64_t>(half || rest);
  } else if (half && (rest || (kept & 1) != 0)) {
    ++kept;
  }
  const double found = std::ldexp(static_cast<double>(kept), last - kLowest - 1074 + scale);  // exact, or infinite
  const bool is_beyond = rounding == Rounding::kToOdd && std::isinf(found);
  const double size = is_beyond ? std::numeric_limits<double>::max() : found;
  return magnitude.is_negative ? -size : size;
}

std::size_t Superaccumulator::expand(std::span<double, kMostTerms> terms, bool& is_first_scaled) const {
  Superaccumulator left = *this;
  std::size_t count = 0;
  // The sum of all hosts may be finite, although this part of it is beyond the largest number.
  is_first_scaled = is_finite() && std::isinf(left.value(1, Rounding::kNearest));
  if (is_first_scaled) {
    terms[count++] = left.value(1, Rounding::kNearest, -32 * static_cast<int>(kScaledDigits));
    left.add_scaled(-terms[0]);
  }
  while (count < terms.size()) {
    const double term = left.value(1, Rounding::kNearest);
    if (count > 0 && term == 0) break;
    terms[count++] = term;
    if (!std::isfinite(term) || term == 0) break;
    left.add(-term);
  }
  return count;
}

}  // namespace bps::server
