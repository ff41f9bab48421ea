// SPDX-License-Identifier: Apache-2.0
#include "worker/silence.h"

#include <gtest/gtest.h>

namespace bps::worker {
namespace {

using Verdict = Silence::Verdict;
using std::chrono::milliseconds;

class SilenceTest : public ::testing::Test {
 protected:
  SilenceTest() { (void)judge(milliseconds(0)); }
  Verdict judge(milliseconds after, bool owes_reply = true, bool was_stopped = false) {
    return silence.judge(start + after, owes_reply, was_stopped);
  }

  const Clock::time_point start = Clock::now();
  Silence silence{10};
};

TEST_F(SilenceTest, AServerThatOwesNothingMayBeSilent) {
  EXPECT_EQ(judge(milliseconds(60000), false), Verdict::kNothing);
}

TEST_F(SilenceTest, IsPingedThenReportedOnceThenLost) {
  EXPECT_EQ(judge(milliseconds(400)), Verdict::kNothing);
  EXPECT_EQ(judge(milliseconds(600)), Verdict::kPing);
  EXPECT_EQ(judge(milliseconds(2100)), Verdict::kPingAndReport);
  EXPECT_EQ(judge(milliseconds(2300)), Verdict::kPing);
  EXPECT_EQ(judge(milliseconds(10100)), Verdict::kLost);
}

TEST_F(SilenceTest, AWordBeginsAnew) {
  EXPECT_EQ(judge(milliseconds(9000)), Verdict::kPingAndReport);
  silence.note_word();
  EXPECT_EQ(judge(milliseconds(9900)), Verdict::kNothing);
  EXPECT_EQ(judge(milliseconds(12100)), Verdict::kPingAndReport) << "it is another silence";
}

TEST_F(SilenceTest, AProcessThatWasStoppedCannotTell) {
  EXPECT_EQ(judge(milliseconds(60000), true, true), Verdict::kNothing);
}

TEST_F(SilenceTest, AServerThatOthersHearHasAsMuchTimeAgain) {
  EXPECT_EQ(judge(milliseconds(2100)), Verdict::kPingAndReport);
  silence.note_reachable(start + milliseconds(2200));
  EXPECT_TRUE(silence.is_expected(start + milliseconds(4300)));
  EXPECT_EQ(judge(milliseconds(4300)), Verdict::kPing);
  EXPECT_EQ(judge(milliseconds(4500)), Verdict::kLost) << "the network is cut";
}

TEST_F(SilenceTest, AServerThatIsExpectedIsNotLostAtTheLimit) {
  EXPECT_EQ(judge(milliseconds(9000)), Verdict::kPingAndReport);
  silence.note_reachable(start + milliseconds(9000));
  EXPECT_EQ(judge(milliseconds(11000)), Verdict::kPing);
}

TEST_F(SilenceTest, NobodyHearsOfAServerThatWasNotReported) {
  EXPECT_EQ(judge(milliseconds(1000)), Verdict::kPing);
  silence.note_reachable(start + milliseconds(1000));
  EXPECT_FALSE(silence.is_expected(start + milliseconds(1100)));
}

}  // namespace
}  // namespace bps::worker
