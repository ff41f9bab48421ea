// SPDX-License-Identifier: Apache-2.0
#include "server/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "server/reduce_reference.h"

namespace bps::server {
namespace {

using testing::Bfloat16;
using testing::Bool;
using testing::Float16;

constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBfloat16, Dtype::kUint8,
                             Dtype::kInt8,    Dtype::kInt32,   Dtype::kInt64,   Dtype::kBool};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

// Whole range for integers; for floats mostly values near one, and every kind of oddity.
template <typename T>
T random_value(std::mt19937_64& random) {
  if constexpr (std::is_same_v<T, Bool>) {
    return {static_cast<std::uint8_t>(random() % 2 == 0 ? 0 : random())};  // some bytes are neither 0 nor 1
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random());
  } else {
    constexpr float kOdd[] = {0.0F, -0.0F, INFINITY, -INFINITY, NAN, 1e-40F, -6e-8F, 3e-5F, 65504.0F, -3.4e38F};
    const float value =
        random() % 8 != 0 ? std::uniform_real_distribution<float>(-4, 4)(random) : kOdd[random() % std::size(kOdd)];
    if constexpr (std::is_floating_point_v<T>)
      return static_cast<T>(value);
    else
      return T::from(value);
  }
}

// Buffers at odd addresses with a border that nobody may write.
class Buffer {
 public:
  Buffer(std::size_t bytes, std::size_t misalignment)
      : bytes_(bytes), start_(kBorder + misalignment), memory_(bytes + 2 * kBorder + misalignment, kFill) {}
  std::byte* data() { return memory_.data() + start_; }
  template <typename T>
  T get(std::size_t index) {
    T value;
    std::memcpy(&value, data() + index * sizeof(T), sizeof value);
    return value;
  }
  bool border_is_intact() const {
    return std::all_of(memory_.begin(), memory_.begin() + start_, [](std::byte b) { return b == kFill; }) &&
           std::all_of(memory_.begin() + start_ + bytes_, memory_.end(), [](std::byte b) { return b == kFill; });
  }

 private:
  static constexpr std::size_t kBorder = 96;
  static constexpr std::byte kFill{0xa5};
  std::size_t bytes_;
  std::size_t start_;
  std::vector<std::byte> memory_;
};

struct Case {
  Reduction what;
  std::size_t sources;
  std::size_t destinations;
  std::size_t count;
  bool in_place;
};

template <typename T>
void check(const Case& test, std::mt19937_64& random) {
  std::vector<Buffer> sources;
  std::vector<std::vector<T>> values(test.count, std::vector<T>(test.sources));
  for (std::size_t s = 0; s < test.sources; ++s) {
    sources.emplace_back(test.count * sizeof(T), random() % 2 * (random() % 64));
    for (std::size_t i = 0; i < test.count; ++i) {
      values[i][s] = random_value<T>(random);
      std::memcpy(sources[s].data() + i * sizeof(T), &values[i][s], sizeof(T));
    }
  }
  std::vector<Buffer> apart;
  for (std::size_t d = 0; d < test.destinations; ++d) apart.emplace_back(test.count * sizeof(T), random() % 64);
  std::vector<const std::byte*> from;
  std::vector<Buffer*> to;
  std::vector<std::byte*> to_data;
  for (auto& source : sources) from.push_back(source.data());
  for (std::size_t d = 0; d < test.destinations; ++d) {
    to.push_back(test.in_place && d < test.sources ? &sources[test.sources - 1 - d] : &apart[d]);
    to_data.push_back(to.back()->data());
  }

  reduce(test.what, from, to_data, test.count);

  for (std::size_t i = 0; i < test.count && !to.empty(); ++i) {
    const T expected = testing::reduce_one(test.what.op, test.what.divisor, values[i]);
    for (Buffer* destination : to) ASSERT_TRUE(testing::same(destination->get<T>(i), expected)) << "element " << i;
  }
  for (auto* all : {&sources, &apart}) {
    for (const Buffer& buffer : *all) ASSERT_TRUE(buffer.border_is_intact());
  }
}

class Reduce : public ::testing::TestWithParam<std::tuple<std::string_view, Dtype>> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_reduce_isa(std::get<0>(GetParam()))); }
  void TearDown() override { set_reduce_isa(available_reduce_isas()[0]); }

  void check_any(const Case& test) {
    SCOPED_TRACE(::testing::Message() << "op " << int{static_cast<std::uint8_t>(test.what.op)} << ", divisor "
                                      << test.what.divisor << ", " << test.sources << " -> " << test.destinations
                                      << (test.in_place ? " in place" : "") << ", count " << test.count);
    switch (test.what.dtype) {
      case Dtype::kFloat32: return check<float>(test, random_);
      case Dtype::kFloat64: return check<double>(test, random_);
      case Dtype::kFloat16: return check<Float16>(test, random_);
      case Dtype::kBfloat16: return check<Bfloat16>(test, random_);
      case Dtype::kUint8: return check<std::uint8_t>(test, random_);
      case Dtype::kInt8: return check<std::int8_t>(test, random_);
      case Dtype::kInt32: return check<std::int32_t>(test, random_);
      case Dtype::kInt64: return check<std::int64_t>(test, random_);
      case Dtype::kBool: return check<Bool>(test, random_);
    }
  }
  // Operations that this type has; divisors that are and are not powers of two, and larger than a byte.
  template <typename Function>
  void for_each_operation(Function&& function) {
    const Dtype dtype = std::get<1>(GetParam());
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::kAverage && dtype == Dtype::kBool) continue;
      function(Reduction{dtype, op, op == ReduceOp::kAverage ? kDivisors[turn_++ % std::size(kDivisors)] : 0});
      if (HasFatalFailure()) return;
    }
  }

 private:
  static constexpr std::uint32_t kDivisors[] = {2, 3, 1, 4, 7, 128, 9, 256, 300, 10, 0x80000000, 4294967291};
  std::mt19937_64 random_{7};
  std::size_t turn_ = 0;
};

TEST_P(Reduce, MatchesTheReferenceForEveryShape) {
  for (const std::size_t count : {0, 1, 3, 8, 15, 33, 64, 65, 131, 517}) {
    for (std::size_t sources = 1; sources <= 9; ++sources) {
      for (std::size_t destinations = 0; destinations <= 3; ++destinations) {
        const bool in_place = (count + sources + destinations) % 2 == 0;
        for_each_operation([&](const Reduction& what) { check_any({what, sources, destinations, count, in_place}); });
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Reduce, MatchesTheReferenceForLargePieces) {
  for_each_operation([&](const Reduction& what) {
    check_any({what, 2, 2, 70'001, true});
    check_any({what, 1, 2, 70'001, false});
    check_any({what, 40, 1, 3'001, false});
  });
}

std::string name_of(const ::testing::TestParamInfo<Reduce::ParamType>& info) {
  return std::string(std::get<0>(info.param)) + "_" + std::string(to_string(std::get<1>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(Isas, Reduce,
                         ::testing::Combine(::testing::ValuesIn(available_reduce_isas().begin(),
                                                                available_reduce_isas().end()),
                                            ::testing::ValuesIn(kDtypes)),
                         name_of);

// Each of the 65536 numbers, alone under average and summed with others: all widenings and all kinds of rounding.
template <typename T>
void check_every_pattern(Dtype dtype) {
  constexpr std::size_t kCount = 65536;
  std::vector<T> every(kCount);
  for (std::size_t i = 0; i < kCount; ++i) every[i].bits = static_cast<std::uint16_t>(i);
  for (const float other : {0.0F, 1.0F, -1.0F, 0.0059F, 3e-5F, -6e-8F, 1e-39F, 60000.0F, 3e38F, NAN}) {
    const std::vector<T> others(kCount, T::from(other));
    std::vector<T> result(kCount);
    const std::byte* const sources[] = {reinterpret_cast<const std::byte*>(every.data()),
                                        reinterpret_cast<const std::byte*>(others.data())};
    std::byte* const destinations[] = {reinterpret_cast<std::byte*>(result.data())};
    for (const std::uint32_t divisor : {1, 2, 3}) {
      reduce({dtype, ReduceOp::kAverage, divisor}, sources, destinations, kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        const T expected = T::from((every[i].value() + others[i].value()) / static_cast<float>(divisor));
        ASSERT_TRUE(testing::same(result[i], expected)) << i << " + " << other << ", divided by " << divisor;
      }
    }
  }
}

class ReduceHalves : public ::testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_reduce_isa(GetParam())); }
  void TearDown() override { set_reduce_isa(available_reduce_isas()[0]); }
};
TEST_P(ReduceHalves, RoundsEveryFloat16) {
  check_every_pattern<Float16>(Dtype::kFloat16);
}
TEST_P(ReduceHalves, RoundsEveryBfloat16) {
  check_every_pattern<Bfloat16>(Dtype::kBfloat16);
}
INSTANTIATE_TEST_SUITE_P(Isas, ReduceHalves,
                         ::testing::ValuesIn(available_reduce_isas().begin(), available_reduce_isas().end()),
                         [](const auto& each) { return std::string(each.param); });

TEST(ReduceIsa, ChoosesTheBestAndRefusesUnknownOnes) {
  EXPECT_EQ(reduce_isa(), available_reduce_isas()[0]);
  EXPECT_EQ(available_reduce_isas().back(), "baseline");
  EXPECT_FALSE(set_reduce_isa("mmx"));
  EXPECT_EQ(reduce_isa(), available_reduce_isas()[0]);
}

TEST(ReduceIsa, DoesNothingWithoutSourcesOrTypes) {
  std::byte byte{7};
  std::byte* const destinations[] = {&byte};
  const std::byte* const sources[] = {&byte, &byte};
  reduce({Dtype::kUint8, ReduceOp::kSum, 1}, {}, destinations, 1);
  reduce({static_cast<Dtype>(77), ReduceOp::kSum, 1}, sources, destinations, 1);
  reduce({Dtype::kUint8, static_cast<ReduceOp>(77), 1}, sources, destinations, 1);
  EXPECT_EQ(byte, std::byte{7});
}

}  // namespace
}  // namespace bps::server
