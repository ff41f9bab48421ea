// SPDX-License-Identifier: Apache-2.0
#include "worker/server_loss.h"

#include <gtest/gtest.h>

namespace bps::worker {
namespace {

TEST(ServerLossTest, AServerOfThisHostIsReportedAgainUntilItsConnectionCloses) {
  ServerLoss loss;
  loss.report();
  loss.report();
  EXPECT_FALSE(loss.is_closed());
  loss.close();
  EXPECT_TRUE(loss.is_closed() && loss.is_reported());
  loss.learn("it was killed");
  EXPECT_TRUE(loss.is_closed() && loss.is_known());
}

TEST(ServerLossTest, AServerIsEndedOnceTheCauseIsKnown) {
  ServerLoss loss;
  loss.learn("it is silent");
  EXPECT_FALSE(loss.is_closed());
  loss.note_ending();
  loss.close();
  EXPECT_TRUE(loss.is_closed() && loss.is_known());
}

TEST(ServerLossDeathTest, AClosedConnectionIsNotReported) {
  ServerLoss loss;
  loss.close();
  EXPECT_DEATH(loss.report(), "the state of the loss of a server cannot change from 2 to 1");
}

}  // namespace
}  // namespace bps::worker
