// SPDX-License-Identifier: Apache-2.0
#include "van/late_rounds.h"

#include <gtest/gtest.h>

namespace bps::van {
namespace {

using enum tensor::OperationKind;

LateRound late(std::uint32_t round, tensor::OperationKind kind, std::uint32_t tensor = 7, std::uint32_t group = 1) {
  return {group, tensor, round, kind};
}

TEST(LateRounds, RanksOfOneKindWaitForTheOthers) {
  LateRounds rounds;
  EXPECT_FALSE(rounds.note(0, late(2, kBroadcast)));
  EXPECT_FALSE(rounds.note(1, late(2, kBroadcast)));
  EXPECT_FALSE(rounds.note(1, late(2, kBroadcast))) << "told again";
  EXPECT_FALSE(rounds.note(2, late(3, kAllGather)));
  EXPECT_FALSE(rounds.note(3, late(1, kAllGather)));
  EXPECT_FALSE(rounds.note(4, late(2, kAllGather, 8)));
  EXPECT_FALSE(rounds.note(5, late(2, kAllGather, 6)));
  EXPECT_FALSE(rounds.note(6, late(2, kAllGather, 7, 2)));
  EXPECT_FALSE(rounds.note(7, late(2, kAllGather, 7, 0)));
}

TEST(LateRounds, ARankOfAnotherKindIsFoundWhicheverCameFirst) {
  for (const auto kind : {kPushPull, kAllGather, kWriteFeedback}) {
    LateRounds rounds;
    EXPECT_FALSE(rounds.note(0, late(2, kBroadcast)));
    const auto other = rounds.note(1, late(2, kind));
    ASSERT_TRUE(other);
    EXPECT_EQ(other->difference.one.rank, 0U);
    EXPECT_EQ(other->difference.one.kind, kBroadcast);
    EXPECT_EQ(other->difference.other.rank, 1U);
    EXPECT_EQ(other->difference.other.kind, kind);
    EXPECT_TRUE(other->is_new);
  }
}

// Thousands may wait in it: one message to all for each of them would be too many.
TEST(LateRounds, ADifferenceIsNewOnce) {
  LateRounds rounds;
  EXPECT_FALSE(rounds.note(0, late(2, kBroadcast)));
  EXPECT_TRUE(rounds.note(1, late(2, kAllGather))->is_new);
  for (const auto kind : {kBroadcast, kAllGather, kPushPull}) EXPECT_FALSE(rounds.note(2, late(2, kind))->is_new);
  EXPECT_FALSE(rounds.note(2, late(3, kAllGather)));
}

TEST(LateRounds, WhoComesWhenTheOthersHaveGoneOnIsToldToo) {
  LateRounds rounds;
  EXPECT_FALSE(rounds.note(0, late(2, kBroadcast)));
  EXPECT_TRUE(rounds.note(1, late(2, kAllGather)));
  EXPECT_FALSE(rounds.note(0, late(3, kBroadcast)));
  EXPECT_FALSE(rounds.note(1, late(3, kBroadcast)));
  const auto found = rounds.note(2, late(2, kBroadcast));
  ASSERT_TRUE(found);
  EXPECT_FALSE(found->is_new);
  EXPECT_EQ(found->difference.other.kind, kAllGather);
}

TEST(LateRounds, WhatARankWaitsForNoMoreIsForgotten) {
  LateRounds rounds;
  EXPECT_FALSE(rounds.note(0, late(2, kBroadcast)));
  EXPECT_FALSE(rounds.note(0, late(3, kBroadcast)));
  EXPECT_FALSE(rounds.note(1, late(2, kAllGather)));
}

}  // namespace
}  // namespace bps::van
