// SPDX-License-Identifier: Apache-2.0
#include "server/round_state.h"

#include <gtest/gtest.h>

#include <vector>

#include "server/round.h"

namespace bps::server {
namespace {

template <typename Enum>
std::vector<int> next_of(Enum from, Enum last) {
  std::vector<int> found;
  for (int to = 0; to <= static_cast<int>(last); ++to) {
    if (has_arrow(from, static_cast<Enum>(to))) found.push_back(to);
  }
  return found;
}

TEST(RoundStateTest, WhatHasEndedChangesNoMore) {
  EXPECT_TRUE(next_of(PushStage::kTaken, PushStage::kTaken).empty());
  EXPECT_TRUE(next_of(AnswerStage::kAnswered, AnswerStage::kEnded).empty());
  EXPECT_TRUE(next_of(AnswerStage::kEnded, AnswerStage::kEnded).empty());
  EXPECT_TRUE(next_of(RoundPhase::kAnswered, RoundPhase::kFailed).empty());
  EXPECT_TRUE(next_of(RoundPhase::kFailed, RoundPhase::kFailed).empty());
}

TEST(RoundStateTest, WhateverHasNotEndedMayFail) {
  for (const auto phase : {RoundPhase::kOpen, RoundPhase::kGathered, RoundPhase::kHeld, RoundPhase::kContributed,
                           RoundPhase::kHostProposed, RoundPhase::kProposed}) {
    EXPECT_TRUE(has_arrow(phase, RoundPhase::kFailed));
  }
  for (const auto stage : {AnswerStage::kNotAsked, AnswerStage::kAwaited, AnswerStage::kGivenUp, AnswerStage::kLanding,
                           AnswerStage::kLanded}) {
    EXPECT_TRUE(has_arrow(stage, AnswerStage::kEnded));
  }
}

TEST(RoundStateTest, AResultIsNeverTakenBack) {
  EXPECT_FALSE(has_arrow(RoundPhase::kAnswered, RoundPhase::kFailed));
  EXPECT_FALSE(has_arrow(RoundPhase::kOpen, RoundPhase::kAnswered));
}

TEST(RoundStateDeathTest, AChangeWithoutAnArrowEndsTheProcess) {
  Round round;
  round.fail({ErrorCode::kTimeout, "", ""});
  EXPECT_DEATH(round.enter(RoundPhase::kAnswered), "the state of a round cannot change from 7 to 6");
}

}  // namespace
}  // namespace bps::server
