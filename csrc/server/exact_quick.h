// SPDX-License-Identifier: Apache-2.0
// Makes exact sums without a look at each addition, which exact_kernels.h tries first. The exponents of the largest and
// the smallest term of a run of elements say whether anything could have been rounded. It is only for reduce_<isa>.cc.
#pragma once

#include "server/exact_checked.h"

namespace bps::server {
namespace {

#if defined(__AVX2__)  // gcc 12 does not see that there is an instruction for it
inline Words larger(Words a, Words b) {
  return (Words)_mm256_max_epu32((__m256i)a, (__m256i)b);
}
inline Words smaller(Words a, Words b) {
  return (Words)_mm256_min_epu32((__m256i)a, (__m256i)b);
}
#else
inline Words larger(Words a, Words b) {
  return a > b ? a : b;
}
inline Words smaller(Words a, Words b) {
  return a < b ? a : b;
}
#endif

// Keeps the largest and the smallest of some magnitudes in each place of the vector. Zeros do not count as the
// smallest.
struct Range {
  Words largest = {};
  Words smallest = Words{} - 1;  // less one, so that zero is the largest of all

  void add(Floats values) {
    const Words size = (Words)values & 0x7fffffff;
    largest = larger(largest, size);
    smallest = smaller(smallest, size - 1);
  }
  // Returns true where a sum of `count` of them may need more than `room` bits beyond those of one of them, or is not
  // finite.
  bool exceeds(int room, std::size_t count) const {
    while (count > 1) {
      --room;
      count = (count + 1) / 2;
    }
    if (room < 0) return true;  // so many terms may have more bits even if all have one exponent
    const Words gap = (largest >> 23) - ((smallest + 1) >> 23);
    const Words bad = (Words)(gap > static_cast<std::uint32_t>(room)) | (Words)(largest >= 0x7f800000);
    return any((Longs)bad);
  }
};

// Adds kUnits units in one go. Returns false, and writes nothing, where some element needs a closer look.
template <typename Element, bool kUnroundedResult, std::size_t kUnits>
[[gnu::always_inline]] inline bool add_quickly(const isa::ExactJob& job, std::size_t index,
                                               const FloatMath<double>::Divisor& divisor) {
  Doubles sum[2 * kUnits];
  for (Doubles& one : sum) one = -(Doubles{});  // a negative zero leaves what it is added to alone
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

// Does the same in float32, where that rounds nothing but the result: a sum of two float32 is rounded once, and sums of
// halves mostly fit. Division by a power of two rounds nothing, either.
template <typename Element, std::size_t kUnits>
[[gnu::always_inline]] inline bool add_in_float(const isa::ExactJob& job, std::size_t index, float factor) {
  Floats sum[kUnits];
  for (Floats& one : sum) one = -(Floats{});
  Range range;
  for (std::size_t s = 0; s < job.source_count; ++s) {
    const std::byte* from = job.sources[s] + index * Element::kBytes;
#pragma GCC unroll 8
    for (std::size_t u = 0; u < kUnits; u += 2) {
      Floats values[2];
      Pairs<Element>::load(from + u * kExactUnit * Element::kBytes, values);
#pragma GCC unroll 2
      for (std::size_t i = 0; i < 2; ++i) {
        if constexpr (Element::kBits < 24) range.add(values[i]);
        sum[u + i] += values[i];
      }
    }
  }
  // Between these there is no overflow on the way to an average, and no subnormal number where there is a division.
  constexpr std::uint32_t kLeast = (Element::kBits == 24 ? 24 : 48) << 23;
  constexpr std::uint32_t kMost = (Element::kBits == 24 ? 255 : 240) << 23;
  if constexpr (Element::kBits == 24) {
    for (const Floats& one : sum) range.add(one);
  } else if (range.exceeds(24 - Element::kBits, job.source_count)) {
    return false;
  }
  if (any((Longs)((Words)(range.largest >= kMost) | (Words)(range.smallest < kLeast)))) return false;
  for (Floats& one : sum) one *= factor;
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* to = job.destinations[d] + index * Element::kBytes;
#pragma GCC unroll 8
    for (std::size_t u = 0; u < kUnits; u += 2) Pairs<Element>::store(to + u * kExactUnit * Element::kBytes, sum + u);
  }
  return true;
}

// Adds float64 where the result is the exact sum rounded. What each addition cuts off (Knuth 1997, 4.2.2) is added,
// too, and its sum mostly fits a float64. It is for plain sources, and division by a power of two. With kFits it
// succeeds only if nothing is cut off, which is faster.
template <bool kFits>
[[gnu::always_inline]] inline bool add_long(const isa::ExactJob& job, std::size_t index,
                                            const FloatMath<double>::Divisor& divisor) {
  constexpr std::size_t kCount = kExactUnit / kDoublesInVector;
  Doubles sum[kCount];
  [[maybe_unused]] Doubles rest[kCount] = {};
  ExactFloat64::load(job.sources[0] + index * sizeof(double), sum);
  for (std::size_t s = 1; s < job.source_count; ++s) {
    Doubles next[kCount];
    ExactFloat64::load(job.sources[s] + index * sizeof(double), next);
#pragma GCC unroll 2
    for (std::size_t i = 0; i < kCount; ++i) {
      if (job.source_count == 2) {
        sum[i] += next[i];  // this is rounded once
      } else if constexpr (kFits) {
        sum[i] = add_exactly(sum[i], next[i]);
      } else {
        const Doubles both = sum[i] + next[i];
        const Doubles of_next = both - sum[i];
        rest[i] = add_exactly(rest[i], (sum[i] - (both - of_next)) + (next[i] - of_next));
        sum[i] = both;
      }
    }
  }
  Longs good = Longs{} - 1;
#pragma GCC unroll 2
  for (std::size_t i = 0; i < kCount; ++i) {
    // An addition of nothing would make a negative zero positive.
    if constexpr (!kFits) sum[i] = rest[i] == 0.0 ? sum[i] : sum[i] + rest[i];
    if (divisor.value == 1) {
      good &= sum[i] == sum[i];
    } else {
      // A sum is good if it is not infinite, where the average may be less, and not rounded again because it is
      // subnormal.
      const Doubles quotient = sum[i] * divisor.reciprocal;
      const Doubles size = (Doubles)((Longs)sum[i] & (~std::uint64_t{0} >> 1));
      good &= (quotient * divisor.value == sum[i]) & (size <= __DBL_MAX__);
      sum[i] = quotient;
    }
  }
  if (any(~good)) return false;
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    ExactFloat64::store(job.destinations[d] + index * sizeof(double), sum);
  }
  return true;
}

template <typename Element, bool kUnroundedResult>
class Quick {
 public:
  explicit Quick(const isa::ExactJob& job) : job_(job), divisor_(job.divisor) {
    bool is_plain = true;
    for (std::size_t s = 0; s < job.source_count; ++s) is_plain &= !job.unrounded[s];
    is_quick_ = Element::kNarrows && is_plain;
    is_float_ =
        !kUnroundedResult && is_quick_ && divisor_.is_power_of_two && (Element::kBytes < 4 || job.source_count == 2);
    may_round_ = !kUnroundedResult && !Element::kNarrows && is_plain && divisor_.is_power_of_two && !job.to_odd;
  }

  // Returns how many elements it has summed, or 0 where each of the next kUnits units needs a look.
  [[gnu::always_inline]] std::size_t run(std::size_t index) {
    if constexpr (!Element::kNarrows && !kUnroundedResult) {
      if (!may_round_) return 0;
      if (long_ == 0) {
        if (add_long<true>(job_, index, divisor_)) return kExactUnit;
        long_ = kRunOfLong;
      }
      --long_;
      return add_long<false>(job_, index, divisor_) ? kExactUnit : 0;
    } else if constexpr (Element::kNarrows) {
      if (!is_quick_ || index + kUnits * kExactUnit > job_.count) return 0;
      const auto factor = static_cast<float>(divisor_.reciprocal);
      if ((is_float_ && add_in_float<Element, kUnits>(job_, index, factor)) ||
          add_quickly<Element, kUnroundedResult, kUnits>(job_, index, divisor_)) {
        return kUnits * kExactUnit;
      }
    }
    return 0;
  }

 private:
  static constexpr std::size_t kUnits = 4;
  // The neighbours of a sum that is longer than a float64 are longer, too: the shorter way is tried again after so many
  // units.
  static constexpr int kRunOfLong = 64;

  const isa::ExactJob& job_;
  FloatMath<double>::Divisor divisor_;
  bool is_quick_;
  bool is_float_;
  bool may_round_;  // the result may be rounded to nearest, once
  int long_ = 0;
};

}  // namespace
}  // namespace bps::server
