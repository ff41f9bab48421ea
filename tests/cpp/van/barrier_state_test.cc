// SPDX-License-Identifier: Apache-2.0
#include "van/barrier_state.h"

#include <gtest/gtest.h>

namespace bps::van {
namespace {

using Callers = std::vector<BarrierState::Caller>;
using Ranks = std::vector<std::uint32_t>;

TEST(BarrierState, ReleasesAllWhenTheLastArrives) {
  BarrierState waiting({1, 4});
  EXPECT_TRUE(waiting.arrive({4, 10}).empty());
  EXPECT_EQ(waiting.arrive({1, 20}), (Callers{{1, 20}, {4, 10}}));
  EXPECT_TRUE(waiting.empty());
}

TEST(BarrierState, ThreadsOfOneRankTakeTurns) {
  BarrierState waiting({0, 1});
  EXPECT_TRUE(waiting.arrive({0, 1}).empty());
  EXPECT_TRUE(waiting.arrive({0, 2}).empty());
  EXPECT_EQ(waiting.arrive({1, 1}), (Callers{{0, 1}, {1, 1}}));
  EXPECT_EQ(waiting.arrive({1, 2}), (Callers{{0, 2}, {1, 2}}));
}

TEST(BarrierState, CancelSaysWhoIsMissing) {
  BarrierState waiting({0, 1, 2});
  EXPECT_TRUE(waiting.arrive({0, 1}).empty());
  EXPECT_TRUE(waiting.arrive({0, 2}).empty());
  EXPECT_TRUE(waiting.arrive({2, 1}).empty());
  EXPECT_EQ(waiting.cancel({0, 2}), (Ranks{1, 2})) << "rank 2 has come once, for the first call";
  EXPECT_EQ(waiting.cancel({0, 1}), Ranks{1});
  EXPECT_EQ(waiting.cancel({0, 1}), std::nullopt);
  EXPECT_EQ(waiting.cancel({9, 1}), std::nullopt);
  EXPECT_TRUE(waiting.arrive({1, 5}).empty()) << "who cancelled is not counted";
}

TEST(BarrierState, CancelAllReturnsEveryCaller) {
  BarrierState waiting({0, 1});
  EXPECT_TRUE(waiting.arrive({1, 1}).empty());
  EXPECT_TRUE(waiting.arrive({1, 2}).empty());
  EXPECT_EQ(waiting.cancel_all(), (Callers{{1, 1}, {1, 2}}));
  EXPECT_TRUE(waiting.empty());
}

}  // namespace
}  // namespace bps::van
