// SPDX-License-Identifier: Apache-2.0
#include "van/job_phase.h"

#include <gtest/gtest.h>

#include "van/scheduler_session.h"

namespace bps::van {
namespace {

TEST(JobPhaseTest, AJobEndsOnce) {
  for (int next = 0; next <= static_cast<int>(PhaseName::kOver); ++next) {
    EXPECT_FALSE(has_arrow(PhaseName::kOver, static_cast<PhaseName>(next)));
  }
}

TEST(JobPhaseDeathTest, ALostViewIsFollowedByNoGathering) {
  JobPhase phase{Gathering{.rendezvous = {1, 1}}};
  phase.begin(Running{});
  phase.begin(Renewing{});
  EXPECT_DEATH(phase.begin(Gathering{.rendezvous = {1, 1}}), "the state of a job cannot change from 3 to 0");
}

TEST(SessionStateTest, OnlyWhoSearchesComesBack) {
  EXPECT_TRUE(has_arrow(SessionState::kSearching, SessionState::kJoined));
  for (const auto state : {SessionState::kAlone, SessionState::kExpelled, SessionState::kRetired}) {
    EXPECT_FALSE(has_arrow(state, SessionState::kJoined));
  }
}

}  // namespace
}  // namespace bps::van
