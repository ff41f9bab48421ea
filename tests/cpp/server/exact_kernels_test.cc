// SPDX-License-Identifier: Apache-2.0
// What the quick ways of exact sums must not get wrong, and that ordinary numbers take them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "server/exact_sum.h"
#include "server/reduce_isa.h"
#include "server/reduce_reference.h"
#include "server/superaccumulator.h"

namespace bps::server {
namespace {

using testing::Bfloat16;
using testing::Float16;

template <typename T>
struct Element;
template <>
struct Element<float> {
  static constexpr Dtype kDtype = Dtype::kFloat32;
  static float from(double value) { return static_cast<float>(value); }
  static double least() { return std::numeric_limits<float>::denorm_min(); }
};
template <>
struct Element<double> {
  static constexpr Dtype kDtype = Dtype::kFloat64;
  static double from(double value) { return value; }
  static double least() { return std::numeric_limits<double>::denorm_min(); }
};
template <>
struct Element<Float16> {
  static constexpr Dtype kDtype = Dtype::kFloat16;
  static Float16 from(double value) { return Float16::from(value); }
  static double least() { return 0x1p-24; }
};
template <>
struct Element<Bfloat16> {
  static constexpr Dtype kDtype = Dtype::kBfloat16;
  static Bfloat16 from(double value) { return Bfloat16::from(value); }
  static double least() { return 0x1p-133; }
};

template <typename T>
struct Job {
  Job(std::size_t count, std::size_t elements) : sources(count, std::vector<T>(elements)), unrounded(count) {}

  // The results, and how many were left to repair(), which puts the exact value there.
  std::pair<std::vector<T>, std::size_t> run(std::uint32_t divisor, bool to_odd = false) {
    std::vector<const std::byte*> at;
    for (const auto& source : sources) at.push_back(reinterpret_cast<const std::byte*>(source.data()));
    std::vector<T> result(sources[0].size());
    std::byte* const into = reinterpret_cast<std::byte*>(result.data());
    repaired = 0;
    by = divisor;
    const auto repair = [](void* self, std::size_t index) {
      auto& job = *static_cast<Job*>(self);
      ++job.repaired;
      return job.value(index);
    };
    run_exactly(Element<T>::kDtype, false,
                {at.data(), reinterpret_cast<const bool*>(unrounded.data()), at.size(), &into, 1, result.size(),
                 divisor, repair, this, to_odd});
    return {result, repaired};
  }
  double value(std::size_t index) const {
    Superaccumulator sum;
    for (const auto& source : sources) {
      if constexpr (std::is_floating_point_v<T>) {
        sum.add(source[index]);
      } else {
        sum.add(source[index].value());
      }
    }
    using Rounding = Superaccumulator::Rounding;
    return sum.value(by, std::is_same_v<T, double> ? Rounding::kNearest : Rounding::kToOdd);
  }

  std::vector<std::vector<T>> sources;
  std::vector<std::uint8_t> unrounded;
  std::size_t repaired = 0;
  std::uint32_t by = 1;
};

template <typename T>
class ExactKernels : public ::testing::Test {
 protected:
  void TearDown() override { set_reduce_isa(best_); }
  std::string_view best_ = reduce_isa();
};
using Types = ::testing::Types<float, double, Float16, Bfloat16>;
TYPED_TEST_SUITE(ExactKernels, Types);

// Whole runs of zeros of all signs, of numbers that cancel, and of such that leave the least number or its negative,
// which a division makes a zero of its sign.
TYPED_TEST(ExactKernels, ZerosHaveTheirSigns) {
  using T = TypeParam;
  for (const std::string_view isa : available_reduce_isas()) {
    ASSERT_TRUE(set_reduce_isa(isa));
    std::mt19937_64 random(3);
    for (const std::size_t count : {1U, 2U, 3U, 4U, 8U}) {
      for (const std::uint32_t divisor : {1U, 2U, 3U, 4U, 1000U}) {
        for (int kind = 0; kind < 6; ++kind) {
          Job<T> job(count, 1000);
          for (std::size_t i = 0; i < 1000; ++i) {
            const double some = std::ldexp(1 + static_cast<double>(random() % 4) / 4, -static_cast<int>(random() % 8));
            const double odd = kind == 3 ? 0.0 : kind == 4 ? Element<T>::least() : -Element<T>::least();
            for (std::size_t s = 0; s < count; ++s) {
              double value = kind == 0 || (kind == 1 && random() % 2 == 0) ? -0.0 : 0.0;
              if (kind > 2 && s + 1 < count) value = s == 0 ? some : s == 1 && count > 2 ? -some : -0.0;
              if (kind > 2 && s + 1 == count) value = count == 2 ? odd - some : odd;
              job.sources[s][i] = Element<T>::from(value);
            }
          }
          const auto [found, repaired] = job.run(divisor);
          for (std::size_t i = 0; i < found.size(); ++i) {
            const T wanted = Element<T>::from(job.value(i));
            ASSERT_EQ(std::memcmp(&found[i], &wanted, sizeof wanted), 0)
                << isa << ", " << count << " sources by " << divisor << ", kind " << kind << ", element " << i;
          }
        }
      }
    }
  }
}

// A third of the sum is the middle of two numbers of the type, but for less than the last place of what it is added in.
TYPED_TEST(ExactKernels, QuotientsBesideTheMiddleAreRoundedToTheirSide) {
  using T = TypeParam;
  constexpr int kBits = std::is_same_v<T, double> ? 53 : std::is_same_v<T, float> ? 24 : 11;
  for (const int bits : {kBits, 8}) {
    for (const double sign : {1.0, -1.0}) {
      for (const double side : {1.0, 0.0, -1.0}) {
        Job<T> job(3, 200);
        for (std::size_t i = 0; i < 200; ++i) {
          job.sources[0][i] = Element<T>::from(sign * 3);
          job.sources[1][i] = Element<T>::from(sign * std::ldexp(3 + static_cast<double>(i % 2 * 6), -bits));
          job.sources[2][i] = Element<T>::from(side * (sizeof(T) == 2 ? 0x1p-22 : 0x1p-51));
        }
        for (const std::string_view isa : available_reduce_isas()) {
          ASSERT_TRUE(set_reduce_isa(isa));
          const auto found = job.run(3).first;
          for (std::size_t i = 0; i < found.size(); ++i) {
            const T wanted = Element<T>::from(job.value(i));
            ASSERT_EQ(std::memcmp(&found[i], &wanted, sizeof wanted), 0)
                << isa << ", " << bits << " bits, " << sign << ", " << side << ", element " << i;
          }
        }
      }
    }
  }
}

// Gradients of any type, also float64 with all its bits, are summed and averaged without repair.
TYPED_TEST(ExactKernels, OrdinaryGradientsNeedNoRepair) {
  using T = TypeParam;
  for (const std::string_view isa : available_reduce_isas()) {
    ASSERT_TRUE(set_reduce_isa(isa));
    std::mt19937_64 random(5);
    std::normal_distribution<double> normal(0, 1e-3);
    for (const std::size_t count : {2U, 3U, 4U, 8U}) {
      Job<T> job(count, 4096);
      for (auto& source : job.sources) {
        for (T& value : source) value = Element<T>::from(normal(random));
      }
      for (const auto divisor : {std::uint32_t{1}, static_cast<std::uint32_t>(count)}) {
        const auto [found, repaired] = job.run(divisor);
        const bool is_too_long = std::is_same_v<T, double> && divisor == 3 && isa != "avx512";
        EXPECT_EQ(repaired > 0, is_too_long) << isa << ", " << count << " by " << divisor << ": " << repaired;
        for (std::size_t i = 0; i < found.size(); ++i) {
          const T wanted = Element<T>::from(job.value(i));
          ASSERT_EQ(std::memcmp(&found[i], &wanted, sizeof wanted), 0) << isa << ", element " << i;
        }
      }
    }
  }
}

// A sum that is rounded again later must not be rounded to nearest: it is left to repair(), all of it that is too long.
TEST(ExactKernelsOfFloat64, LeaveALongSumThatIsRoundedAgain) {
  const std::string_view best = reduce_isa();
  for (const std::string_view isa : available_reduce_isas()) {
    ASSERT_TRUE(set_reduce_isa(isa));
    for (const std::size_t count : {2U, 3U}) {
      Job<double> job(count, 256);
      for (std::size_t i = 0; i < 256; ++i) {
        job.sources[0][i] = 1;
        job.sources[1][i] = i % 2 == 0 ? 0x1p-60 : 0.5;
      }
      EXPECT_EQ(job.run(1, true).second, 128U) << isa;
      EXPECT_EQ(job.run(1, false).second, 0U) << isa;
    }
  }
  set_reduce_isa(best);
}

}  // namespace
}  // namespace bps::server
