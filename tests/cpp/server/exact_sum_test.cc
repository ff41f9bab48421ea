// SPDX-License-Identifier: Apache-2.0
#include "server/exact_sum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "server/exact_accumulator.h"
#include "server/reduce_reference.h"
#include "server/superaccumulator.h"

namespace bps::server {
namespace {

using testing::Bfloat16;
using testing::Float16;
using Rounding = Superaccumulator::Rounding;

template <typename T>
constexpr Dtype kDtypeOf = Dtype::kFloat32;
template <>
constexpr Dtype kDtypeOf<double> = Dtype::kFloat64;
template <>
constexpr Dtype kDtypeOf<Float16> = Dtype::kFloat16;
template <>
constexpr Dtype kDtypeOf<Bfloat16> = Dtype::kBfloat16;

template <typename T>
T from_double(double value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else {
    return T::from(value);
  }
}

template <typename T>
double to_double(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return value;
  } else {
    return value.value();
  }
}

// What hides mistakes least: sums of all lengths, cancellation, halves of last places, subnormal numbers, infinities.
template <typename T>
T any_value(std::mt19937_64& random) {
  constexpr double kOdd[] = {0, -0.0, INFINITY, -INFINITY, NAN, 65504, -65504, 3.4e38, -3.4e38, 1e-45, -6e-8, 1e-40};
  if (random() % 40 == 0) return from_double<T>(kOdd[random() % std::size(kOdd)]);
  const double mantissa = static_cast<double>(random() % 4096) - 2048;
  const int range = random() % 3 == 0 ? (std::is_same_v<T, double> ? 900 : 120) : 12;
  return from_double<T>(std::ldexp(mantissa, static_cast<int>(random() % (2 * range)) - range - 11));
}

template <typename T>
T expected(ReduceOp op, std::uint32_t divisor, const std::vector<std::vector<T>>& sources, std::size_t element) {
  Superaccumulator sum;
  for (const auto& source : sources) sum.add(to_double(source[element]));
  const bool again = !std::is_same_v<T, double> || op == ReduceOp::kExactSumToOdd;
  const double value =
      sum.value(op == ReduceOp::kExactAverage ? divisor : 1, again ? Rounding::kToOdd : Rounding::kNearest);
  return from_double<T>(value);
}

template <typename T>
void expect_equal(T found, T wanted, const std::string& where) {
  if (std::isnan(to_double(wanted))) {
    const T canonical = from_double<T>(std::numeric_limits<double>::quiet_NaN());
    EXPECT_EQ(std::memcmp(&found, &canonical, sizeof found), 0) << where << ": another NaN";
    return;
  }
  EXPECT_EQ(std::memcmp(&found, &wanted, sizeof found), 0)
      << where << ": " << to_double(found) << " for " << to_double(wanted);
}

// Mantissa bits, and the exponents of the smallest normal number and of the largest.
struct Format {
  int bits, least, most;
};
template <typename T>
constexpr Format kFormat = {24, -126, 127};
template <>
constexpr Format kFormat<double> = {53, -1022, 1023};
template <>
constexpr Format kFormat<Float16> = {11, -14, 15};
template <>
constexpr Format kFormat<Bfloat16> = {8, -126, 127};

// Terms whose sum, divided, lies in the middle between two numbers of the type, or a little beside it: where rounding
// twice, or a rounded addition, shows. Those of a run are alike, so that whole runs are added in the quick ways.
template <typename T>
struct AlmostMiddle {
  explicit AlmostMiddle(std::mt19937_64& random) {
    constexpr Format kOf = kFormat<T>;
    const int range = random() % 3 == 0 ? 24 : kOf.most - kOf.least - 12;
    exponent = kOf.least - kOf.bits + static_cast<int>(random() % range);
    distance = kOf.bits + 1 + static_cast<int>(random() % (random() % 2 == 0 ? 10 : 60 - kOf.bits));
    extra = random() % 2 == 0 ? 0 : 24 + static_cast<int>(random() % 12);
  }
  int exponent = 0;
  int distance = 0;  // bits to where it is off the middle, if it is
  int extra = 0;     // bits to where a term of its own makes the sum longer, if it does

  void set(std::mt19937_64& random, std::uint32_t divisor, std::vector<std::vector<T>>& sources,
           std::size_t element) const {
    constexpr Format kOf = kFormat<T>;
    const int unit = std::max(exponent, kOf.least) - kOf.bits + 1;
    const double number = std::ldexp(1 + static_cast<double>(random() % 1000) / 1024, exponent - unit);
    const double middle = std::ldexp(std::floor(number) + 0.5, unit) * divisor;
    const auto side = [&] { return static_cast<double>(random() % 3) - 1; };
    double rest = middle * (1 + std::ldexp(side(), -distance)) * (random() % 2 == 0 ? 1 : -1);
    const std::size_t first = random() % sources.size();
    for (std::size_t i = 0; i < sources.size(); ++i) {
      T& value = sources[(first + i) % sources.size()][element];
      if (extra != 0 && middle != 0 && i + 1 == sources.size()) {
        rest =
            std::ldexp(side() * (1 + static_cast<double>(random() % 1024 * 2 + 1) / 8192), std::ilogb(middle) - extra);
      }
      value = from_double<T>(rest);
      if (!std::isfinite(to_double(value))) value = from_double<T>(0);
      rest -= to_double(value);
    }
  }
};

// Each run of elements takes another way through the kernels: ordinary gradients, with and without something odd among
// them, the largest and the smallest numbers, small whole ones.
template <typename T>
std::vector<std::vector<T>> random_sources(std::mt19937_64& random, std::size_t count, std::size_t elements,
                                           std::uint32_t divisor) {
  std::vector<std::vector<T>> sources(count, std::vector<T>(elements));
  std::normal_distribution<double> normal;
  constexpr double kScales[] = {1, 1e-3, 6e4, 3.3e38, 3e-38, 1e-39, 1e-5};
  AlmostMiddle<T> middle(random);
  for (std::size_t i = 0; i < elements; ++i) {
    const std::size_t run = i / 80;
    if (i % 80 == 0) middle = AlmostMiddle<T>(random);
    const std::size_t kind = (run * 7 + elements + count) % 20;
    if (kind >= 10) {
      middle.set(random, divisor, sources, i);
      continue;
    }
    for (auto& source : sources) {
      double value = kind < std::size(kScales) ? kScales[kind] * normal(random) : static_cast<double>(random() % 9) - 4;
      if (kind == 3) value = std::copysign(std::is_same_v<T, double> ? 1.7e308 : 3.38e38, value);
      source[i] = from_double<T>(value);
      if (kind == 9 || random() % 500 == 0) source[i] = any_value<T>(random);
    }
  }
  return sources;
}

template <typename T>
std::byte* bytes_of(std::vector<T>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

// The sum of some sources as a host sends it.
template <typename T>
std::vector<std::byte> sum_on_host(std::vector<std::vector<T>>& sources, std::size_t first, std::size_t count) {
  const std::size_t elements = sources[first].size();
  std::vector<std::byte> bytes(tensor::most_unrounded_bytes(kDtypeOf<T>, elements));
  tensor::UnroundedWriter writer(bytes.data(), elements);
  ExactSum sum;
  sum.begin({kDtypeOf<T>, ReduceOp::kExactSum, 1}, &writer);
  std::vector<const std::byte*> at;
  for (std::size_t i = 0; i < count; ++i) {
    sum.add_plain();
    at.push_back(bytes_of(sources[first + i]));
  }
  std::byte* const into = writer.sums();
  sum.sum(0, elements, at, {&into, 1});
  writer.finish();
  bytes.resize(tensor::unrounded_bytes(bytes.data(), elements));
  return bytes;
}

template <typename T>
class ExactSums : public ::testing::Test {};
using Types = ::testing::Types<float, double, Float16, Bfloat16>;
TYPED_TEST_SUITE(ExactSums, Types);

TYPED_TEST(ExactSums, AreRoundedOnceWithEveryInstructionSet) {
  using T = TypeParam;
  const std::string_view best = reduce_isa();
  for (const std::string_view isa : available_reduce_isas()) {
    ASSERT_TRUE(set_reduce_isa(isa));
    std::mt19937_64 random(7);
    for (const std::size_t count : {1U, 2U, 3U, 4U, 8U}) {
      for (const std::size_t elements : {1U, 3U, 16U, 37U, 500U, 4000U}) {
        for (int trial = 0; trial < (elements == 4000 ? 8 : 2); ++trial) {
          const ReduceOp op = trial % 4 == 0 ? ReduceOp::kExactSum : ReduceOp::kExactAverage;
          const std::uint64_t divisors[] = {count, count, 1 + random() % 4096, std::uint64_t{1} << random() % 21};
          const auto divisor = static_cast<std::uint32_t>(divisors[random() % 4]);
          auto sources = random_sources<T>(random, count, elements, op == ReduceOp::kExactSum ? 1 : divisor);
          const auto before = sources;
          ExactSum sum;
          sum.begin({kDtypeOf<T>, op, divisor});
          std::vector<const std::byte*> at;
          for (auto& source : sources) {
            sum.add_plain();
            at.push_back(bytes_of(source));
          }
          std::vector<T> apart(elements);
          std::byte* const into[] = {bytes_of(sources[0]), bytes_of(apart)};  // the first one in place
          sum.sum(0, elements, at, into);
          for (std::size_t i = 0; i < elements; ++i) {
            const std::string where = std::string(isa) + " " + std::to_string(count) + " sources, element " +
                                      std::to_string(i) + " by " + std::to_string(divisor);
            const T wanted = expected(op, divisor, before, i);
            expect_equal(apart[i], wanted, where);
            expect_equal(sources[0][i], wanted, where);
          }
        }
      }
    }
  }
  set_reduce_isa(best);
}

// Any grouping on hosts, in any order, block by block, gives the bits of one sum over all.
TYPED_TEST(ExactSums, DoNotDependOnWhatIsSummedFirst) {
  using T = TypeParam;
  std::mt19937_64 random(11);
  for (int trial = 0; trial < 60; ++trial) {
    const std::size_t elements = 1 + random() % 1500;
    const std::size_t count = 2 + random() % 7;
    const ReduceOp op = random() % 2 == 0 ? ReduceOp::kExactSum : ReduceOp::kExactAverage;
    const auto divisor = static_cast<std::uint32_t>(op == ReduceOp::kExactSum ? 1 : count);
    auto sources = random_sources<T>(random, count, elements, divisor);
    const Reduction what{kDtypeOf<T>, op, static_cast<std::uint32_t>(count)};
    ExactSum sum;
    sum.begin(what);
    std::vector<std::vector<std::byte>> hosts;
    std::vector<const std::byte*> plain;
    for (std::size_t first = 0; first < count;) {
      const std::size_t size = std::min(count - first, 1 + random() % 4);
      if (size == 1) {
        plain.push_back(bytes_of(sources[first]));
        sum.add_plain();
      } else {
        hosts.push_back(sum_on_host(sources, first, size));
        plain.push_back(nullptr);
        sum.add_unrounded({hosts.back(), elements});
      }
      first += size;
    }
    // The result goes where the first host's sum lies, as on a server.
    std::vector<T> result(elements);
    std::byte* const into = hosts.empty() ? bytes_of(result) : hosts.front().data();
    const std::size_t block = 1 + random() % elements;
    for (std::size_t first = 0; first < elements; first += block) {
      std::vector<const std::byte*> at = plain;
      for (const std::byte*& source : at) {
        if (source != nullptr) source += first * sizeof(T);
      }
      std::byte* const part = into + first * sizeof(T);
      sum.sum(first, std::min(block, elements - first), at, {&part, 1});
    }
    std::memcpy(static_cast<void*>(result.data()), into, elements * sizeof(T));
    for (std::size_t i = 0; i < elements; ++i) {
      expect_equal(result[i], expected(op, what.divisor, sources, i), "trial " + std::to_string(trial));
    }
  }
}

TYPED_TEST(ExactSums, AddUpInAnAccumulatorFirst) {
  using T = TypeParam;
  std::mt19937_64 random(13);
  for (int trial = 0; trial < 40; ++trial) {
    const std::size_t elements = 1 + random() % 100;
    auto sources = random_sources<T>(random, 6, elements, 6);
    ExactAccumulator one(kDtypeOf<T>, elements);
    ExactAccumulator other(kDtypeOf<T>, elements);
    for (std::size_t i = 0; i < sources.size(); ++i) (i < 4 ? one : other).add(bytes_of(sources[i]));
    // As ExactSum of Python does it, with two ranks.
    std::vector<double> ours(one.sums().begin(), one.sums().end());
    std::vector<double> theirs(other.sums().begin(), other.sums().end());
    ExactSum both;
    const ReduceOp op = std::is_same_v<T, double> ? ReduceOp::kExactAverage : ReduceOp::kExactSumToOdd;
    both.begin({Dtype::kFloat64, op, 6});
    both.add_plain();
    both.add_plain();
    const std::byte* at[] = {bytes_of(ours), bytes_of(theirs)};
    std::byte* const into = bytes_of(ours);
    both.sum(0, elements, at, {&into, 1});
    std::vector<std::uint32_t> beyond;
    for (std::uint32_t i = 0; i < elements; ++i) {
      if (std::isnan(ours[i])) beyond.push_back(i);
    }
    std::vector<double> parts = one.parts(beyond);
    const std::vector<double> more = other.parts(beyond);
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i] += more[i];
    std::vector<T> result(elements);
    one.round(ours, beyond, parts, 6, std::is_same_v<T, double>, bytes_of(result));
    for (std::size_t i = 0; i < elements; ++i) {
      expect_equal(result[i], expected(ReduceOp::kExactAverage, 6, sources, i), "trial " + std::to_string(trial));
    }
  }
}

TEST(Superaccumulator, RoundsLikeTheProcessorWhereThatIsExact) {
  std::mt19937_64 random(17);
  for (int trial = 0; trial < 20000; ++trial) {
    const auto a = std::bit_cast<double>(random());
    const auto b = std::ldexp(std::bit_cast<double>(random() >> 2 | 0x3ff0000000000000), 0);
    Superaccumulator sum;
    sum.add(a);
    sum.add(b);
    const double wanted = a + b;  // rounded once
    const double found = sum.value(1, Rounding::kNearest);
    EXPECT_TRUE(found == wanted || (std::isnan(found) && std::isnan(wanted))) << a << " + " << b;
    Superaccumulator alone;
    alone.add(a);
    const auto divisor = static_cast<std::uint32_t>(1 + random() % 100000);
    const double quotient = alone.value(divisor, Rounding::kNearest);
    EXPECT_TRUE(quotient == a / divisor || (std::isnan(quotient) && std::isnan(a))) << a << " / " << divisor;
  }
}

TEST(Superaccumulator, KeepsWhatCancels) {
  Superaccumulator sum;
  for (const double term : {1e308, 1e308, 1.0, 5e-324, -1e308, -1e308}) sum.add(term);
  EXPECT_EQ(sum.value(1, Rounding::kNearest), 1.0);
  EXPECT_EQ(sum.value(1, Rounding::kToOdd), std::nextafter(1.0, 2.0));
  sum.add(-1.0);
  EXPECT_EQ(sum.value(1, Rounding::kNearest), 5e-324);
  sum.add(-5e-324);
  EXPECT_EQ(std::bit_cast<std::uint64_t>(sum.value(1, Rounding::kNearest)), 0U);
}

// Of so many sources even numbers of one exponent may need more bits than there are: the look at exponents must not
// take less than no room for much. Half of the sources cancel the other half, so that what is rounded on the way shows.
template <typename T>
void expect_exact_sum_of_many(std::size_t count, double large, double small) {
  constexpr std::size_t kElements = 64;  // a run, which is added in the quick ways
  std::vector<T> plus(kElements, from_double<T>(large));
  std::vector<T> minus(kElements, from_double<T>(-large));
  std::vector<T> between(kElements, from_double<T>(small));
  std::vector<const std::byte*> at;
  ExactSum sum;
  sum.begin({kDtypeOf<T>, ReduceOp::kExactSum, 1});
  for (std::size_t i = 0; i < count; ++i) {
    sum.add_plain();
    at.push_back(bytes_of(i == count / 2 ? between : i < count / 2 ? plus : minus));
  }
  std::vector<T> result(kElements);
  std::byte* const into = bytes_of(result);
  sum.sum(0, kElements, at, {&into, 1});
  for (const T one : result) ASSERT_EQ(to_double(one), to_double(between[0])) << count;
}

TEST(ExactSumOfMany, RoundsNothing) {
  const std::string_view best = reduce_isa();
  for (const std::string_view isa : available_reduce_isas()) {
    ASSERT_TRUE(set_reduce_isa(isa));
    expect_exact_sum_of_many<Float16>(8197, 65504, 6e-8);
    expect_exact_sum_of_many<Float16>(20001, 65504, 6e-8);
    expect_exact_sum_of_many<Float16>(20001, 1.9990234375, 1);
    expect_exact_sum_of_many<Bfloat16>(140001, 1.9921875, 1);
    expect_exact_sum_of_many<float>(4001, 3e38, 1e-40);
  }
  set_reduce_isa(best);
}

// All of a host's ranks at the end of the range: the sum is cut into numbers that are not beyond it, none is lost.
TEST(Superaccumulator, ASumFarBeyondTheLargestNumberTravelsWhole) {
  constexpr double kMost = std::numeric_limits<double>::max();
  for (const int count : {2, 24, 25, 64, 65, 1000, 10000}) {
    for (const double sign : {1.0, -1.0}) {
      constexpr std::uint64_t kElements = 3;
      std::vector<std::byte> bytes(tensor::most_unrounded_bytes(Dtype::kFloat64, kElements));
      tensor::UnroundedWriter writer(bytes.data(), kElements);
      std::vector<double> most{sign * kMost, 1, sign * kMost};
      std::vector<double> least{sign * 5e-324, 0, 0};
      ExactSum host;
      host.begin({Dtype::kFloat64, ReduceOp::kExactSum, 1}, &writer);
      std::vector<const std::byte*> at;
      for (int i = 0; i <= count; ++i) {
        host.add_plain();
        at.push_back(bytes_of(i == 0 ? least : most));
      }
      std::byte* const sums = writer.sums();
      host.sum(0, kElements, at, {&sums, 1});
      writer.finish();
      const std::uint64_t used = tensor::unrounded_bytes(bytes.data(), kElements);
      ASSERT_LE(used, bytes.size());

      // Another host has the opposites, but for the smallest number: that is what is left.
      for (double& one : most) one = -one;
      ExactSum server;
      server.begin({Dtype::kFloat64, ReduceOp::kExactSum, 1});
      server.add_unrounded({{bytes.data(), used}, kElements});
      at.assign(1, nullptr);
      for (int i = 0; i < count; ++i) {
        server.add_plain();
        at.push_back(bytes_of(most));
      }
      std::vector<double> result(kElements);
      std::byte* const into = bytes_of(result);
      server.sum(0, kElements, at, {&into, 1});
      EXPECT_EQ(result[0], sign * 5e-324) << count;
      EXPECT_EQ(result[1], 0) << count;
      EXPECT_EQ(result[2], 0) << count;
    }
  }
}

// What is not finite needs no more than a number: memory does not grow by what an overflow leaves in a gradient.
TEST(ExactAccumulator, KeepsInfinitiesAndNanInTheirPlace) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  ExactAccumulator sum(Dtype::kFloat32, 6);
  std::vector<float> first{INFINITY, NAN, INFINITY, 1, 1e38F, 1e38F};
  std::vector<float> second{INFINITY, 1, -INFINITY, NAN, 1e-38F, 1e-38F};
  std::vector<float> third{-1e38F, 1e-38F, 1, 1, 1, -INFINITY};
  for (auto* one : {&first, &second, &third}) sum.add(bytes_of(*one));
  EXPECT_EQ(sum.beyond(), std::vector<std::uint32_t>{4});
  EXPECT_EQ(sum.sums()[0], INFINITY);
  for (const std::size_t i : {1, 2, 3}) EXPECT_TRUE(std::isnan(sum.sums()[i])) << i;
  EXPECT_EQ(sum.sums()[5], -INFINITY) << "also after it was longer than a float64";
  std::vector<float> result(6);
  const std::vector<double> sums{INFINITY, kNan, kNan, kNan, kNan, -INFINITY};
  sum.round(sums, sum.beyond(), sum.parts(sum.beyond()), 1, false, bytes_of(result));
  EXPECT_EQ(result[0], INFINITY);
  EXPECT_EQ(result[4], 1e38F);
  EXPECT_EQ(result[5], -INFINITY);
}

TEST(Unrounded, ReaderStaysWithinItsBytesWhateverTheyAre) {
  std::mt19937_64 random(19);
  for (int trial = 0; trial < 2000; ++trial) {
    const std::uint64_t elements = 1 + random() % 8;
    std::vector<std::byte> bytes(tensor::kUnroundedHeader + elements * sizeof(double) + random() % 200);
    for (std::byte& one : bytes) one = random() % 3 == 0 ? std::byte{0} : static_cast<std::byte>(random());
    tensor::UnroundedReader reader(bytes, elements);  // under the address sanitizer
    for (std::uint32_t i = 0; i < elements; ++i) {
      double sum = 0;
      for (const double term : reader.terms(i).terms) sum += term;
      static_cast<void>(sum);
    }
  }
}

}  // namespace
}  // namespace bps::server
