// SPDX-License-Identifier: Apache-2.0
#include "worker/pace.h"

#include <gtest/gtest.h>

namespace bps::worker {
namespace {

using std::chrono::milliseconds;

TEST(Pace, PartitionsGoOutInTheirTurn) {
  Pace pace;
  pace.begin(10);
  EXPECT_TRUE(pace.allows(9));
  EXPECT_FALSE(pace.allows(10));
  pace.note_answered(3);
  EXPECT_TRUE(pace.allows(12));
  EXPECT_FALSE(pace.allows(13));
}

TEST(Pace, WithoutOneAllMayGoOut) {
  Pace pace;
  pace.begin(Pace::kNone);
  EXPECT_TRUE(pace.allows(~std::uint32_t{0}));
  pace.note_answered(1);
  EXPECT_TRUE(pace.allows(~std::uint32_t{0}));
}

TEST(Pace, WithoutAnswersItEnds) {
  Pace pace;
  pace.begin(10);
  const Clock::time_point start = Clock::now();
  EXPECT_FALSE(pace.is_stalled(start));
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(200)));
  pace.note_answered(1);
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(300)));
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(500)));
  EXPECT_TRUE(pace.is_stalled(start + milliseconds(600)));
  EXPECT_TRUE(pace.allows(99));
  pace.begin(10);
  EXPECT_FALSE(pace.allows(99)) << "for that operation only";
}

TEST(Pace, WhatIsNotAnsweredLetsOthersPassToItsEnd) {
  Pace pace;
  pace.begin(10);
  const Clock::time_point start = Clock::now();
  EXPECT_FALSE(pace.is_stalled(start));
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(19)));
  EXPECT_FALSE(pace.lets_others_pass());
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(20)));
  EXPECT_TRUE(pace.lets_others_pass());
  pace.note_answered(1);
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(21)));
  EXPECT_TRUE(pace.lets_others_pass());
  pace.begin(10);
  EXPECT_FALSE(pace.lets_others_pass());
}

TEST(Pace, FastLinksHaveMoreUnderWay) {
  EXPECT_EQ(Pace::each_of(8), 8U);
  EXPECT_EQ(Pace::each_of(16 << 10), 8U);
  EXPECT_EQ(Pace::each_of(32 << 10), 4U);
  EXPECT_EQ(Pace::each_of(64 << 10), 2U);
  EXPECT_EQ(Pace::each_of(256 << 10), 4U);
  EXPECT_EQ(Pace::each_of(512 << 10), 8U);
  EXPECT_EQ(Pace::each_of(4 << 20), 8U);
}

}  // namespace
}  // namespace bps::worker
