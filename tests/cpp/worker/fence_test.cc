// SPDX-License-Identifier: Apache-2.0
// When a process of this host is ended because it could still write: a server that is alive, and that a worker loop
// goes away from.
#include <gtest/gtest.h>

#include "worker/relaying_loop.h"

namespace bps::worker {
namespace {

using FenceTest = RelayingLoop;

TEST_F(FenceTest, AServerThatReachesACallersMemoryIsEnded) {
  const auto operation = submit();
  ASSERT_EQ(data.posted, 1U);
  worker_loop.reset();
  EXPECT_EQ(data.fences, 1);
  EXPECT_TRUE(operation->over());
}

// It lies in a staging buffer, which nobody uses again.
TEST_F(FenceTest, AServerThatHasTheContributionOfAHostIsLeftAlone) {
  worker_loop->relay().contribute(0, header, 0, 0);
  worker_loop->step();  // makes a buffer
  worker_loop->step();
  ASSERT_EQ(data.posted, 1U);
  worker_loop.reset();
  EXPECT_EQ(data.fences, 0) << "a healthy server of the other ranks";
}

TEST_F(FenceTest, AServerThatWasOnlyToldThatAHostWillNotContributeIsLeftAlone) {
  worker_loop->relay().refuse(header, 0, Error(ErrorCode::kRoundAborted, "the view has ended", ""));
  ASSERT_EQ(control.sent<tensor::Cancel>().size(), 1U);
  worker_loop.reset();
  EXPECT_EQ(data.fences, 0) << "it has nothing that it could write to";
}

}  // namespace
}  // namespace bps::worker
