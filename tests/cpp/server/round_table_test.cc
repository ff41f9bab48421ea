// SPDX-License-Identifier: Apache-2.0
#include "server/round_table.h"

#include <gtest/gtest.h>

namespace bps::server {
namespace {

using Found = RoundTable::Found;

class RoundTableTest : public ::testing::Test {
 protected:
  TableShare share;
  RoundTable table{{.rounds = 1 << 20, .words = 1 << 20}};
  const RoundGroup group{{1, {0, 1, 2}}, {}, {}};
  const RoundKey key{1, 7, 3};
};

TEST_F(RoundTableTest, RoundsOfAKeyAreSeparate) {
  const auto first = table.find_or_open(key, 0, group, share);
  const auto second = table.find_or_open(key, 1, group, share);
  EXPECT_EQ(first.found, Found::kNew);
  EXPECT_EQ(second.found, Found::kNew);
  EXPECT_NE(first.round, second.round);
  EXPECT_EQ(table.find_or_open(key, 0, group, share).round, first.round);
  EXPECT_EQ(table.find_or_open(key, 1, group, share).found, Found::kOpen);
  EXPECT_EQ(first.round->arrivals.size(), 3U);
  EXPECT_EQ(table.find({1, 7, 4}, 0), nullptr);
}

TEST_F(RoundTableTest, GroupsDoNotMeet) {
  const RoundGroup other{{2, {0, 1, 2, 3}}, {}, {}};
  const auto first = table.find_or_open(key, 0, group, share);
  const auto second = table.find_or_open({2, 7, 3}, 0, other, share);
  EXPECT_EQ(second.found, Found::kNew);
  EXPECT_NE(first.round, second.round);
  EXPECT_EQ(second.round->arrivals.size(), 4U);
}

TEST_F(RoundTableTest, AClosedRoundIsRemembered) {
  table.close(table.find_or_open(key, 0, group, share).round);
  EXPECT_EQ(table.find_or_open(key, 0, group, share).found, Found::kOver);
  EXPECT_EQ(table.find_or_open(key, 1, group, share).found, Found::kNew);
}

TEST_F(RoundTableTest, RoundsMayEndInAnyOrder) {
  for (std::uint32_t i = 0; i < 5; ++i) table.find_or_open(key, i, group, share);
  for (const std::uint32_t i : {3U, 1U, 4U, 0U, 2U}) {
    table.close(table.find(key, i));
    EXPECT_EQ(table.find_or_open(key, i, group, share).found, Found::kOver);
  }
  EXPECT_TRUE(table.open().empty());
  EXPECT_EQ(table.find_or_open(key, 5, group, share).found, Found::kNew);
}

TEST_F(RoundTableTest, HundredsOfRoundsMayBeOpenAndEndInAnyOrder) {
  for (std::uint32_t i = 0; i < 500; ++i) ASSERT_EQ(table.find_or_open(key, i, group, share).found, Found::kNew);
  // 500 and 181 have no common factor: every round once, far apart.
  for (std::uint32_t i = 0, number = 7; i < 500; ++i, number = (number + 181) % 500) {
    table.close(table.find(key, number));
    ASSERT_EQ(table.find_or_open(key, number, group, share).found, Found::kOver);
    const std::uint32_t next = (number + 181) % 500;
    if (i < 499) {
      ASSERT_EQ(table.find_or_open(key, next, group, share).found, Found::kOpen);
    }
  }
  EXPECT_TRUE(table.open().empty());
  for (std::uint32_t i = 0; i < 500; ++i) ASSERT_EQ(table.find_or_open(key, i, group, share).found, Found::kOver);
  EXPECT_EQ(table.find_or_open(key, 500, group, share).found, Found::kNew);
}

// Other servers sum the rounds of a key while they have it: a server that gets it, or gets it back, has missed any
// number.
TEST_F(RoundTableTest, AKeyMayComeAfterManyRoundsElsewhere) {
  std::uint64_t words = 0;
  std::uint32_t number = 0;
  for (std::uint32_t stay = 0; stay < 20; ++stay, number += 1'000'000) {
    for (std::uint32_t i = 0; i < 200; ++i) {
      const std::uint32_t later = number + (i ^ 1);  // two ranks start two of them in different orders
      ASSERT_EQ(table.find_or_open(key, later, group, share).found, Found::kNew) << later;
      table.close(table.find(key, later));
      ASSERT_EQ(table.find_or_open(key, later, group, share).found, Found::kOver);
    }
    if (stay == 0) words = share.words;
    EXPECT_TRUE(table.is_over(key, number + 199));
    EXPECT_FALSE(table.is_over(key, number + 200));
    EXPECT_EQ(share.words, words + stay) << "a word for all that it has missed, however much that is";
    number += 200;
  }
  EXPECT_FALSE(table.is_over(key, 5'000)) << "nobody can say that it will not come";
  EXPECT_EQ(table.keys(), 1U);
}

TEST_F(RoundTableTest, NumbersMayWrap) {
  constexpr std::uint32_t kStep = 1U << 29;
  std::uint32_t number = 0;
  for (std::uint32_t i = 0; i < 20; ++i, number += kStep) {
    ASSERT_EQ(table.find_or_open(key, number, group, share).found, Found::kNew) << i;
    table.close(table.find(key, number));
    ASSERT_EQ(table.find_or_open(key, number, group, share).found, Found::kOver);
    if (i >= 4) {
      ASSERT_TRUE(table.is_over(key, number - 3 * kStep - 1)) << "it was long ago";
    }
  }
  EXPECT_LE(share.words, 20U) << "gaps that are far behind are forgotten";
}

TEST_F(RoundTableTest, AKeyMayComeLateInAVeryLongJob) {
  ASSERT_EQ(table.find_or_open(key, 3'000'000'000, group, share).found, Found::kNew);
  ASSERT_EQ(table.find_or_open(key, 2'999'999'999, group, share).found, Found::kNew);
}

TEST_F(RoundTableTest, ManyRoundsReuseTheSameMemory) {
  const Round* only = table.find_or_open(key, 0, group, share).round;
  table.close(table.find(key, 0));
  for (std::uint32_t i = 1; i < 100000; ++i) {
    Round* round = table.find_or_open(key, i, group, share).round;
    ASSERT_EQ(round, only);
    ASSERT_EQ(round->counts.pushed, 0U);
    table.close(round);
  }
  EXPECT_EQ(table.keys(), 1U);
}

TEST_F(RoundTableTest, WhoOpensTooManyRoundsOpensNoMore) {
  RoundTable small{{.rounds = 3, .words = 1 << 20}};
  TableShare other;
  for (std::uint32_t i = 0; i < 3; ++i) small.find_or_open(key, i, group, share);
  EXPECT_EQ(small.find_or_open(key, 3, group, share).found, Found::kTooMany);
  EXPECT_EQ(small.find_or_open(key, 2, group, share).found, Found::kOpen) << "what others wait for goes on";
  EXPECT_EQ(small.find_or_open(key, 3, group, other).found, Found::kNew) << "others have a share of their own";
  small.close(small.find(key, 0));
  EXPECT_EQ(small.find_or_open(key, 4, group, share).found, Found::kNew) << "one is over";
  small.close(small.find(key, 3));
  EXPECT_EQ(other.rounds, 0U);
  EXPECT_EQ(share.rounds, 3U);
}

TEST_F(RoundTableTest, WhoUsesTooManyKeysUsesNoMore) {
  RoundTable small{{.rounds = 1 << 20, .words = 200}};
  TableShare other;
  std::uint32_t keys = 0;
  while (keys < 1000 && small.find_or_open({1, 7, keys}, 0, group, share).found == Found::kNew) {
    small.close(small.find({1, 7, keys++}, 0));
  }
  EXPECT_LT(keys, 20U);
  EXPECT_EQ(small.keys(), keys) << "a refused one leaves nothing behind";
  EXPECT_EQ(small.find_or_open({1, 7, keys}, 0, group, share).found, Found::kTooMany);
  EXPECT_EQ(small.find_or_open({1, 7, 0}, 1, group, share).found, Found::kNew) << "known keys may be used";
  EXPECT_EQ(small.find_or_open({1, 7, keys}, 0, group, other).found, Found::kNew);
}

TEST_F(RoundTableTest, RoundsOutOfOrderCountToo) {
  RoundTable small{{.rounds = 1 << 20, .words = 100}};
  small.find_or_open(key, 0, group, share);
  const std::uint64_t before = share.words;
  std::uint32_t last = 2;
  for (; small.find_or_open(key, last, group, share).found == Found::kNew; last += 2)
    small.close(small.find(key, last));
  EXPECT_EQ(share.words, 100U) << "one word for each gap";
  for (std::uint32_t i = 0; i < last; ++i) {
    if (small.find_or_open(key, i, group, share).round != nullptr) small.close(small.find(key, i));
  }
  EXPECT_EQ(share.words, before) << "what is over in order takes no room";
  EXPECT_EQ(small.find_or_open(key, last, group, share).found, Found::kNew);
}

}  // namespace
}  // namespace bps::server
