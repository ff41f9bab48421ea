// SPDX-License-Identifier: Apache-2.0
#include "worker/pace.h"

#include <gtest/gtest.h>

#include <array>

namespace bps::worker {
namespace {

using std::chrono::milliseconds;

TEST(Pace, EachServerHasAsMuchUnderWayAsItsPart) {
  Pace pace;
  pace.begin(100, 10);
  const std::array<std::uint64_t, 3> sizes{60, 30, 10};
  std::array<std::uint64_t, 3> sent{};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    while (pace.allows(sent[i], sizes[i])) ++sent[i];
  }
  EXPECT_EQ(sent, (std::array<std::uint64_t, 3>{6, 3, 1}));
  pace.note_answered(10);
  EXPECT_TRUE(pace.allows(11, 60));
  EXPECT_FALSE(pace.allows(12, 60));
}

TEST(Pace, AServerThatIsBehindHoldsTheOthersUp) {
  Pace pace;
  pace.begin(200, 8);
  std::uint64_t sent = 0;
  for (bool any = true; any;) {  // of two servers of 100 partitions, one answers and the other one does not
    any = false;
    while (pace.allows(sent, 100)) {
      ++sent;
      pace.note_answered(1);
      any = true;
    }
  }
  EXPECT_EQ(sent, 8U);
}

TEST(Pace, WithoutAnswersItEnds) {
  Pace pace;
  pace.begin(100, 10);
  const Clock::time_point start = Clock::now();
  EXPECT_FALSE(pace.is_stalled(start));
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(200)));
  pace.note_answered(1);
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(300)));
  EXPECT_FALSE(pace.is_stalled(start + milliseconds(500)));
  EXPECT_TRUE(pace.is_stalled(start + milliseconds(600)));
  EXPECT_TRUE(pace.allows(99, 100));
  pace.begin(100, 10);
  EXPECT_FALSE(pace.allows(99, 100)) << "for that operation only";
}

TEST(Pace, FastLinksHaveMoreUnderWay) {
  EXPECT_EQ(Pace::each_of(64 << 10), 2U);
  EXPECT_EQ(Pace::each_of(256 << 10), 4U);
  EXPECT_EQ(Pace::each_of(512 << 10), 8U);
  EXPECT_EQ(Pace::each_of(4 << 20), 8U);
}

}  // namespace
}  // namespace bps::worker
