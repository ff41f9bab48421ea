// SPDX-License-Identifier: Apache-2.0
#include "compress/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "compress/compression.h"
#include "compress/error_feedback.h"
#include "compress/int8_blocks.h"

namespace bps::compress {
namespace {

constexpr std::uint64_t kSeed = 3;

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
const float kNan = std::numeric_limits<float>::quiet_NaN();

// Made once of each text.
const Codec& named(const std::string& text) {
  static std::map<std::string, std::shared_ptr<const Compression>> made;
  std::shared_ptr<const Compression>& one = made[text];
  if (!one) one = parse_compression(text);
  return *one->codec;
}

Bytes encoded(const Codec& codec, const Floats& from) {
  Bytes to(codec.encoded_size(from.size()), std::byte{0xa5});
  codec.encode(from, to, kSeed);
  return to;
}

Floats decoded(const Codec& codec, const Bytes& from, std::size_t elements) {
  Floats to(elements, -7.0F);
  EXPECT_EQ(codec.decode(from, to, Into::kReplace), Decoded::kOk);
  return to;
}

Floats there_and_back(const Codec& codec, const Floats& from) {
  return decoded(codec, encoded(codec, from), from.size());
}

float one(const std::string& name, float value) {
  return there_and_back(named(name), {value})[0];
}

Floats normal_numbers(std::size_t count, float deviation) {
  std::mt19937 generator(count);
  std::normal_distribution<float> distribution(0, deviation);
  Floats values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

// The value of a 16-bit float with so many bits of fraction, by its definition; the largest exponent is not meant.
double half_value(std::uint32_t half, int fraction_bits, int bias) {
  const auto exponent = static_cast<int>(half >> fraction_bits);
  const double fraction = std::ldexp(static_cast<double>(half & ((1U << fraction_bits) - 1)), -fraction_bits);
  return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
}

// Every finite half, the middle between it and the next one, and the two float32 beside that middle.
void round_to_nearest_even(const std::string& name, int fraction_bits, int bias) {
  const auto infinity = ((1U << (15 - fraction_bits)) - 1) << fraction_bits;
  const auto narrow = [&](float value) {
    std::uint16_t half;
    std::memcpy(&half, encoded(named(name), {value}).data(), 2);
    return std::uint32_t{half};
  };
  for (std::uint32_t half = 0; half < infinity; ++half) {
    const double value = half_value(half, fraction_bits, bias);
    const auto middle = static_cast<float>((value + half_value(half + 1, fraction_bits, bias)) / 2);
    ASSERT_EQ(narrow(static_cast<float>(value)), half);
    ASSERT_EQ(narrow(static_cast<float>(-value)), half | 0x8000);
    ASSERT_EQ(narrow(std::nextafter(middle, 0.0F)), half);
    ASSERT_EQ(narrow(middle), half + (half & 1));
    ASSERT_EQ(narrow(std::nextafter(middle, kInfinity)), half + 1);
    ASSERT_EQ(one(name, static_cast<float>(-value)), static_cast<float>(-value));
  }
}

TEST(Float16Codec, RoundsToNearestEvenEverywhere) {
  round_to_nearest_even("fp16", 10, 15);
}
TEST(Bfloat16Codec, RoundsToNearestEvenEverywhere) {
  round_to_nearest_even("bf16", 7, 127);
}

TEST(HalfCodecs, KeepInfinityAndNan) {
  for (const auto* name : {"fp16", "bf16"}) {
    EXPECT_EQ(one(name, kInfinity), kInfinity);
    EXPECT_EQ(one(name, -kInfinity), -kInfinity);
    EXPECT_EQ(one(name, kLargest), kInfinity);
    for (const std::uint32_t bits : {0x7fc00000U, 0xffc00000U, 0x7f800001U, 0x7fffffffU, 0xffffffffU}) {
      const float back = one(name, std::bit_cast<float>(bits));
      EXPECT_TRUE(std::isnan(back));
      EXPECT_EQ(std::signbit(back), (bits >> 31) != 0);
    }
  }
}

// The documented formula, an element at a time and with the library's rounding.
Bytes int8_reference(const Floats& from) {
  Bytes to;
  for (std::size_t begin = 0; begin < from.size(); begin += 256) {
    const Floats block(from.begin() + static_cast<std::ptrdiff_t>(begin),
                       from.begin() + static_cast<std::ptrdiff_t>(std::min(begin + 256, from.size())));
    float largest = 0;
    for (const float value : block) largest = std::max(largest, std::fabs(value));
    const float scale = std::min(largest / 127.0F, Int8BlocksCodec::kLargestScale);
    const auto scale_bytes = std::bit_cast<std::array<std::byte, 4>>(scale);
    to.insert(to.end(), scale_bytes.begin(), scale_bytes.end());
    const float inverse = 1.0F / scale;
    for (const float value : block) {
      const float product = value * inverse;
      to.push_back(static_cast<std::byte>(static_cast<std::int8_t>(std::nearbyint(product))));
    }
  }
  return to;
}

TEST(Int8Blocks, WritesWhatTheFormulaSays) {
  for (const std::size_t count : {1U, 3U, 255U, 256U, 257U, 10000U}) {
    for (const float deviation : {1e-30F, 1e-3F, 1.0F, 1e30F}) {
      const Floats values = normal_numbers(count, deviation);
      ASSERT_EQ(encoded(named("int8"), values), int8_reference(values)) << count << " elements, " << deviation;
    }
  }
  const Floats halves{127, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, -2.5F, 0, -0.0F};
  EXPECT_EQ(there_and_back(named("int8"), halves), (Floats{127, 0, 2, 2, 0, -2, -2, 0, 0}));
}

TEST(Int8Blocks, IsWithinHalfAScale) {
  const Floats values = normal_numbers(2048, 1.0F);
  const Floats back = there_and_back(named("int8"), values);
  for (std::size_t begin = 0; begin < values.size(); begin += 256) {
    float largest = 0;
    for (std::size_t i = begin; i < begin + 256; ++i) largest = std::max(largest, std::fabs(values[i]));
    for (std::size_t i = begin; i < begin + 256; ++i) {
      EXPECT_LE(std::fabs(values[i] - back[i]), largest / 127 * 0.50001F);
    }
  }
}

TEST(Int8Blocks, NothingOverflowsAtTheEnds) {
  const Floats large = there_and_back(named("int8"), {kLargest, -kLargest, kLargest / 2});
  EXPECT_TRUE(std::isfinite(large[0]));
  EXPECT_NEAR(large[0] / kLargest, 1.0F, 1e-6F);
  EXPECT_EQ(large[1], -large[0]);
  EXPECT_NEAR(large[2] / kLargest, 0.5F, 0.005F);
  const float smallest = std::numeric_limits<float>::min();
  EXPECT_EQ(there_and_back(named("int8"), {100 * smallest, -smallest}), (Floats{0, 0}));
  EXPECT_EQ(there_and_back(named("int8"), {254 * smallest, -2 * smallest}), (Floats{254 * smallest, -2 * smallest}));
}

TEST(Int8Blocks, NanAndInfinitySpoilTheirBlockOnly) {
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    Floats values(600, 1.0F);
    values[300] = bad;
    const Floats back = there_and_back(named("int8"), values);
    for (std::size_t i = 0; i < back.size(); ++i) EXPECT_EQ(std::isnan(back[i]), i >= 256 && i < 512) << i;
  }
}

TEST(Int8Blocks, RefusesScalesThatNoEncoderWrites) {
  const float above = std::nextafter(Int8BlocksCodec::kLargestScale, kInfinity);
  const float subnormal = std::numeric_limits<float>::denorm_min();
  const Floats good(300, 1.0F);
  for (const float scale : {-1.0F, -0.0F, -kNan, kInfinity, above, subnormal}) {
    Bytes bytes = encoded(named("int8"), good);
    std::memcpy(bytes.data() + 260, &scale, sizeof(scale));
    Floats to(300, 5.0F);
    EXPECT_EQ(named("int8").decode(bytes, to, Into::kReplace), Decoded::kMalformed) << scale;
    EXPECT_EQ(to, Floats(300, 5.0F));
  }
}

class EachCodec : public testing::TestWithParam<std::string_view> {
 protected:
  static const Codec& codec() { return named(std::string(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(All, EachCodec, testing::ValuesIn(codec_names()),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(EachCodec, AddsAndSubtractsWhatItWouldReplaceWith) {
  for (const std::size_t count : {0U, 1U, 7U, 255U, 256U, 257U, 1031U}) {
    const Bytes bytes = encoded(codec(), normal_numbers(count, 3.0F));
    const Floats values = decoded(codec(), bytes, count);
    Floats sum(count, 1.5F);
    Floats difference(count, 1.5F);
    EXPECT_EQ(codec().decode(bytes, sum, Into::kAdd), Decoded::kOk);
    EXPECT_EQ(codec().decode(bytes, difference, Into::kSubtract), Decoded::kOk);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(sum[i], 1.5F + values[i]);
      EXPECT_EQ(difference[i], 1.5F - values[i]);
    }
  }
}

TEST_P(EachCodec, TakesAnyAlignmentAndWritesNothingBeside) {
  const Floats values = normal_numbers(300, 3.0F);
  const std::size_t size = codec().encoded_size(values.size());
  Bytes room(size + 2, std::byte{0x5a});
  codec().encode(values, std::span(room).subspan(1, size), kSeed);
  EXPECT_EQ(room.front(), std::byte{0x5a});
  EXPECT_EQ(room.back(), std::byte{0x5a});
  Floats to(values.size());
  EXPECT_EQ(codec().decode(std::span(room).subspan(1, size), to, Into::kReplace), Decoded::kOk);
  EXPECT_EQ(to, there_and_back(codec(), values));
}

TEST_P(EachCodec, RefusesAnotherSizeAndWritesNothing) {
  for (const std::size_t count : {0U, 1U, 256U, 300U}) {
    const std::size_t right = codec().encoded_size(count);
    for (std::size_t size = right < 5 ? 0 : right - 5; size < right + 5; ++size) {
      if (size == right) continue;
      Floats to(count, 5.0F);
      EXPECT_EQ(codec().decode(Bytes(size), to, Into::kAdd), Decoded::kWrongSize) << size;
      EXPECT_EQ(to, Floats(count, 5.0F));
    }
  }
}

TEST_P(EachCodec, TakesAnyBytes) {
  std::mt19937 generator(1);
  for (int round = 0; round < 2000; ++round) {
    const std::size_t count = generator() % 600;
    Bytes bytes(codec().encoded_size(count));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(generator());
    Floats to(count, 5.0F);
    const bool taken = codec().decode(bytes, to, Into::kReplace) == Decoded::kOk;
    EXPECT_TRUE(taken || to == Floats(count, 5.0F));
  }
}

// What 1,000 rounds delivered differs from what they were given by one residual, not by the errors of 1,000 rounds.
TEST_P(EachCodec, ErrorFeedbackLosesNothingOverManyRounds) {
  constexpr std::size_t kCount = 300;
  constexpr int kRounds = 1000;
  const Floats gradient = normal_numbers(kCount, 1.0F);
  const float plain_error = std::fabs(there_and_back(codec(), gradient)[0] - gradient[0]) * kRounds;
  Floats residual(kCount, 0.0F);
  Bytes bytes(codec().encoded_size(kCount));
  std::vector<double> delivered(kCount);
  for (int round = 0; round < kRounds; ++round) {
    encode_with_feedback(codec(), gradient, residual, bytes, static_cast<std::uint64_t>(round));
    const Floats back = decoded(codec(), bytes, kCount);
    for (std::size_t i = 0; i < kCount; ++i) delivered[i] += back[i];
  }
  for (std::size_t i = 0; i < kCount; ++i) {
    EXPECT_NEAR(delivered[i] + residual[i], kRounds * double{gradient[i]}, 1e-3 + 5e-3 * std::fabs(gradient[i]));
  }
  EXPECT_LT(std::fabs(residual[0]), plain_error / 10);
}

TEST_P(EachCodec, ErrorFeedbackForgetsARoundThatOverflowed) {
  Floats gradient(4, 1.0F);
  Floats residual(4, 0.0F);
  Bytes bytes(codec().encoded_size(4));
  for (const float bad : {kNan, kInfinity, kLargest}) {
    gradient[1] = bad;
    encode_with_feedback(codec(), gradient, residual, bytes, kSeed);
    for (const float value : residual) EXPECT_TRUE(std::isfinite(value));
  }
}

}  // namespace
}  // namespace bps::compress
