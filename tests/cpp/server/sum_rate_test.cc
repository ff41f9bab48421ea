// SPDX-License-Identifier: Apache-2.0
#include "server/sum_rate.h"

#include <gtest/gtest.h>

namespace bps::server {
namespace {

TEST(SumRate, HostsThatAreAlikeGetTheSameFigure) {
  EXPECT_EQ(coarse_rate(4e9), std::uint64_t{1} << 32);
  EXPECT_EQ(coarse_rate(4.9e9), coarse_rate(3.8e9));
  EXPECT_EQ(coarse_rate(6e9), 6'074'000'999U);
  EXPECT_LT(coarse_rate(1.4e9), coarse_rate(2e9));
  EXPECT_EQ(coarse_rate(0), 1U);
}

TEST(SumRate, SomethingIsMeasuredForAnyNumberOfLoops) {
  for (const std::size_t loops : {0U, 1U, 2U, 64U}) EXPECT_GT(measure_sum_rate(loops), 0.0) << loops;
}

}  // namespace
}  // namespace bps::server
