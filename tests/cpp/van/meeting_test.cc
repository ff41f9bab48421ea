#include "van/meeting.h"

#include <gtest/gtest.h>

namespace bps::van {
namespace {

using Callers = std::vector<Meeting::Caller>;
using Ranks = std::vector<std::uint32_t>;

TEST(Meeting, ReleasesAllWhenTheLastArrives) {
  Meeting meeting({1, 4});
  EXPECT_TRUE(meeting.arrive({4, 10}).empty());
  EXPECT_EQ(meeting.arrive({1, 20}), (Callers{{1, 20}, {4, 10}}));
  EXPECT_TRUE(meeting.empty());
}

TEST(Meeting, ThreadsOfOneRankTakeTurns) {
  Meeting meeting({0, 1});
  EXPECT_TRUE(meeting.arrive({0, 1}).empty());
  EXPECT_TRUE(meeting.arrive({0, 2}).empty());
  EXPECT_EQ(meeting.arrive({1, 1}), (Callers{{0, 1}, {1, 1}}));
  EXPECT_EQ(meeting.arrive({1, 2}), (Callers{{0, 2}, {1, 2}}));
}

TEST(Meeting, CancelSaysWhoIsMissing) {
  Meeting meeting({0, 1, 2});
  EXPECT_TRUE(meeting.arrive({0, 1}).empty());
  EXPECT_TRUE(meeting.arrive({0, 2}).empty());
  EXPECT_TRUE(meeting.arrive({2, 1}).empty());
  EXPECT_EQ(meeting.cancel({0, 2}), (Ranks{1, 2})) << "rank 2 has come once, for the first call";
  EXPECT_EQ(meeting.cancel({0, 1}), Ranks{1});
  EXPECT_EQ(meeting.cancel({0, 1}), std::nullopt);
  EXPECT_EQ(meeting.cancel({9, 1}), std::nullopt);
  EXPECT_TRUE(meeting.arrive({1, 5}).empty()) << "who cancelled is not counted";
}

TEST(Meeting, DissolveSendsEverybodyHome) {
  Meeting meeting({0, 1});
  EXPECT_TRUE(meeting.arrive({1, 1}).empty());
  EXPECT_TRUE(meeting.arrive({1, 2}).empty());
  EXPECT_EQ(meeting.dissolve(), (Callers{{1, 1}, {1, 2}}));
  EXPECT_TRUE(meeting.empty());
}

}  // namespace
}  // namespace bps::van
