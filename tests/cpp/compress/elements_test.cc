// SPDX-License-Identifier: Apache-2.0
#include "compress/elements.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace bps::compress {
namespace {

constexpr Dtype kHalves[] = {Dtype::kBfloat16, Dtype::kFloat16};

TEST(Elements, EveryHalfIsTheSameAfterItWasWidened) {
  for (const Dtype dtype : kHalves) {
    std::vector<std::uint16_t> halves(1 << 16);
    for (std::uint32_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
    std::vector<float> floats(halves.size());
    widen(dtype, reinterpret_cast<const std::byte*>(halves.data()), floats);
    std::vector<std::uint16_t> back(halves.size());
    narrow(dtype, floats, reinterpret_cast<std::byte*>(back.data()));
    for (std::uint32_t i = 0; i < halves.size(); ++i) {
      if (std::isnan(floats[i])) {
        std::vector<float> again(1);
        widen(dtype, reinterpret_cast<const std::byte*>(&back[i]), again);
        EXPECT_TRUE(std::isnan(again[0])) << i;
      } else {
        EXPECT_EQ(back[i], halves[i]);
      }
    }
  }
}

// At addresses that nothing is aligned to.
std::vector<float> rounded(Dtype dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype) + 1);
  narrow(dtype, values, bytes.data() + 1);
  std::vector<float> back(values.size());
  widen(dtype, bytes.data() + 1, back);
  return back;
}

TEST(Elements, RoundsToNearestEven) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  EXPECT_EQ(rounded(Dtype::kBfloat16, {1 + 0x1p-8F, 1 + 0x3p-8F, 1 + 0x1.01p-8F, -kInfinite, 3e38F, -0.0F}),
            (std::vector<float>{1, 1 + 0x4p-8F, 1 + 0x1p-7F, -kInfinite, 0x1.c4p127F, -0.0F}));
  EXPECT_EQ(rounded(Dtype::kFloat16, {1 + 0x1p-11F, 1 + 0x3p-11F, 65519, 65520, 0x1p-25F, 0x1.8p-25F}),
            (std::vector<float>{1, 1 + 0x1p-9F, 65504, kInfinite, 0, 0x1p-24F}));
  const std::vector<float> plain{1.2345678F, -7e-39F};
  EXPECT_EQ(rounded(Dtype::kFloat32, plain), plain);
}

TEST(Elements, AreAddedAsFloat32) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    std::vector<std::byte> ones(37 * size_of(dtype));
    narrow(dtype, std::vector<float>(37, 1.0F), ones.data());
    std::vector<float> sum(37, 0x1p-20F);
    widen(dtype, ones.data(), sum, Into::kAdd);
    EXPECT_EQ(sum, std::vector<float>(37, 1 + 0x1p-20F)) << to_string(dtype);
    widen(dtype, ones.data(), sum, Into::kSubtract);
    EXPECT_EQ(sum, std::vector<float>(37, 0x1p-20F)) << to_string(dtype);
  }
}

}  // namespace
}  // namespace bps::compress
