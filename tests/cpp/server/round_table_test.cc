// SPDX-License-Identifier: Apache-2.0
#include "server/round_table.h"

#include <gtest/gtest.h>

namespace bps::server {
namespace {

using Found = RoundTable::Found;

class RoundTableTest : public ::testing::Test {
 protected:
  RoundTable table;
  const van::Group group{1, {0, 1, 2}};
  const RoundKey key{1, 7, 3};
};

TEST_F(RoundTableTest, RoundsOfAKeyAreSeparate) {
  const auto first = table.find_or_open(key, 0, group);
  const auto second = table.find_or_open(key, 1, group);
  EXPECT_EQ(first.found, Found::kNew);
  EXPECT_EQ(second.found, Found::kNew);
  EXPECT_NE(first.round, second.round);
  EXPECT_EQ(table.find_or_open(key, 0, group).round, first.round);
  EXPECT_EQ(table.find_or_open(key, 1, group).found, Found::kOpen);
  EXPECT_EQ(first.round->arrivals.size(), 3U);
  EXPECT_EQ(table.find({1, 7, 4}, 0), nullptr);
}

TEST_F(RoundTableTest, GroupsDoNotMeet) {
  const van::Group other{2, {0, 1, 2, 3}};
  const auto first = table.find_or_open(key, 0, group);
  const auto second = table.find_or_open({2, 7, 3}, 0, other);
  EXPECT_EQ(second.found, Found::kNew);
  EXPECT_NE(first.round, second.round);
  EXPECT_EQ(second.round->arrivals.size(), 4U);
}

TEST_F(RoundTableTest, AClosedRoundIsRemembered) {
  table.close(table.find_or_open(key, 0, group).round);
  EXPECT_EQ(table.find_or_open(key, 0, group).found, Found::kOver);
  EXPECT_EQ(table.find_or_open(key, 1, group).found, Found::kNew);
}

TEST_F(RoundTableTest, RoundsMayEndInAnyOrder) {
  for (std::uint32_t i = 0; i < 5; ++i) table.find_or_open(key, i, group);
  for (const std::uint32_t i : {3U, 1U, 4U, 0U, 2U}) {
    table.close(table.find(key, i));
    EXPECT_EQ(table.find_or_open(key, i, group).found, Found::kOver);
  }
  EXPECT_TRUE(table.open().empty());
  EXPECT_EQ(table.find_or_open(key, 5, group).found, Found::kNew);
}

TEST_F(RoundTableTest, HundredsOfRoundsMayBeOpenAndEndInAnyOrder) {
  for (std::uint32_t i = 0; i < 500; ++i) ASSERT_EQ(table.find_or_open(key, i, group).found, Found::kNew);
  // 500 and 181 have no common factor: every round once, far apart.
  for (std::uint32_t i = 0, number = 7; i < 500; ++i, number = (number + 181) % 500) {
    table.close(table.find(key, number));
    ASSERT_EQ(table.find_or_open(key, number, group).found, Found::kOver);
    const std::uint32_t next = (number + 181) % 500;
    if (i < 499) {
      ASSERT_EQ(table.find_or_open(key, next, group).found, Found::kOpen);
    }
  }
  EXPECT_TRUE(table.open().empty());
  for (std::uint32_t i = 0; i < 500; ++i) ASSERT_EQ(table.find_or_open(key, i, group).found, Found::kOver);
  EXPECT_EQ(table.find_or_open(key, 500, group).found, Found::kNew);
}

TEST_F(RoundTableTest, TooFarAheadIsRefusedAndNumbersMayWrap) {
  EXPECT_EQ(table.find_or_open(key, 1 << 16, group).found, Found::kTooFarAhead);
  EXPECT_EQ(table.find_or_open(key, ~std::uint32_t{0}, group).found, Found::kOver);  // just behind zero
}

TEST_F(RoundTableTest, ManyRoundsReuseTheSameMemory) {
  const Round* only = table.find_or_open(key, 0, group).round;
  table.close(table.find(key, 0));
  for (std::uint32_t i = 1; i < 100000; ++i) {
    Round* round = table.find_or_open(key, i, group).round;
    ASSERT_EQ(round, only);
    ASSERT_EQ(round->pushed, 0U);
    table.close(round);
  }
  EXPECT_EQ(table.keys(), 1U);
}

}  // namespace
}  // namespace bps::server
