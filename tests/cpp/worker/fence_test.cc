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
  EXPECT_TRUE(operation->is_over());
}

// On a busy machine this process sees the end of the peer before it looks at what the peer has posted.
TEST_F(FenceTest, AnAnswerThatAServerHasPostedBeforeItsEndCounts) {
  const auto operation = submit();
  ASSERT_EQ(data.posted, 1U);
  const auto push = codec::decode<tensor::PushHeader>(data.headers.front());
  ASSERT_TRUE(push.has_value());
  data.rest = {{push->immediate, kBytes}};
  data.fenced = true;  // its process has ended
  std::vector<std::uint32_t> suspected;
  worker_loop->events.when_lost = [&](std::uint32_t node, const std::string&) { suspected.push_back(node); };
  data.sink->on_lost(data, "connection closed");
  EXPECT_EQ(suspected, std::vector<std::uint32_t>{1});
  worker_loop->lose_server(1, "server has left the job");
  ASSERT_TRUE(operation->is_over());
  EXPECT_FALSE(operation->failure().has_value()) << operation->failure()->what();
}

TEST_F(FenceTest, AnOperationThatAServerHasNotAnsweredBeforeItsEndFails) {
  const auto operation = submit();
  data.fenced = true;
  worker_loop->events.when_lost = [](std::uint32_t, const std::string&) {};
  data.sink->on_lost(data, "connection closed");
  worker_loop->lose_server(1, "server has left the job");
  ASSERT_TRUE(operation->is_over());
  EXPECT_EQ(operation->failure().value().code(), ErrorCode::kPeerLost);
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
