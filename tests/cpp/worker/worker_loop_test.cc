// SPDX-License-Identifier: Apache-2.0
#include "worker/worker_loop.h"

#include "worker/loop_and_servers.h"

namespace bps::worker::testing {
namespace {

TEST_F(WorkerLoopTest, TheCreditIsSharedByTheServers) {
  const auto operation = submit(50, 0);
  worker_loop.step();
  deliver();
  EXPECT_EQ(pushes(0), 2U);
  EXPECT_EQ(pushes(1), 2U) << "one server's queue must not take what the other one needs";
  while (!operation->is_done()) {
    worker_loop.step();
    deliver();
    EXPECT_LE(pushes(0) - std::min(pushes(0), pushes(1)), 2U);
    EXPECT_LE(pushes(1) - std::min(pushes(0), pushes(1)), 2U);
  }
  EXPECT_EQ(pushes(0) + pushes(1), 100U);
}

TEST_F(WorkerLoopTest, WhatIsUrgentOvertakesOnEveryServer) {
  const auto slow = submit(500, -1);
  worker_loop.step();
  deliver();
  const auto urgent = submit(1, 1);
  while (!urgent->is_done()) {
    worker_loop.step();
    deliver();
  }
  for (std::size_t server = 0; server < kServers; ++server) {
    EXPECT_LE(pushes(server), 2U + 2U + 2U) << "in flight before, with it, and behind it";
  }
  EXPECT_FALSE(slow->is_done());
  while (!slow->is_done()) {
    worker_loop.step();
    deliver();
  }
}

// Another thread calls shutdown(), and the servers know already that this rank has left.
TEST_F(WorkerLoopTest, WhatBeginsAfterTheLeavingFailsByIt) {
  worker_loop.leave(Error(ErrorCode::kNotInitialized, "shut down", "init"));
  for (const auto& server_loop : server_loops) server_loop->leave_node(1, "worker 0 has left the job");
  const auto operation = submit(5, 0);
  while (!operation->is_done()) {
    worker_loop.step();
    deliver();
  }
  EXPECT_EQ(operation->failure()->code(), ErrorCode::kNotInitialized) << operation->failure()->what();
  EXPECT_EQ(pushes(0) + pushes(1), 0U);
}

TEST_F(WorkerLoopTest, AnAbortedOperationEndsWhenEveryServerHasAcknowledged) {
  const auto operation = submit(50, 0, with_silent);
  worker_loop.step();
  deliver();
  EXPECT_FALSE(worker_loop.is_idle());
  abort_all();
  EXPECT_TRUE(operation->is_failing());
  EXPECT_FALSE(operation->is_done()) << "the servers do not know yet";
  transport.poll();
  EXPECT_FALSE(operation->is_done()) << "they have been told";
  transport.poll();
  ASSERT_TRUE(operation->is_done()) << "they have replied";
  EXPECT_TRUE(worker_loop.is_idle());
  try {
    operation->rethrow();
    FAIL() << "it has failed";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_NE(std::string(error.what()).find("too late: server still waits for rank 1"), std::string::npos)
        << error.what();
  }
}

TEST_F(WorkerLoopTest, AnAbortThatComesTooLateChangesNothing) {
  const auto operation = submit(1, 0);
  worker_loop.step();
  transport.poll();  // the servers have summed and answered
  abort_all();
  for (int i = 0; i < 4; ++i) deliver();
  ASSERT_TRUE(operation->is_done());
  operation->rethrow();
}

TEST_F(WorkerLoopTest, APushAndAPullOfOneRoundThatWereNeverSentCanBothBeAborted) {
  const auto tensor = declare(3, group);
  const auto push = submit(tensor, one_half(true));
  abort_all();
  for (int i = 0; i < 4; ++i) deliver();
  ASSERT_TRUE(push->is_done());
  EXPECT_EQ(server_loops[0]->open_rounds(), 0U) << "nobody else is in the group";
  const auto pull = submit(tensor, one_half(false));
  abort_all();
  for (int i = 0; i < 4; ++i) deliver();
  EXPECT_TRUE(pull->is_done()) << "the round is over, and will not be answered";
}

// After an abort nothing but a loss ends the wait for a server that replies to everything else.
class WorkerLoopOwedTest : public WorkerLoopTest {
 protected:
  // What is said of server 1 when it replies to an abort like that, and then to pings alone. Its replies of its own go
  // nowhere.
  std::string lost_after(const std::optional<tensor::Cancelled>& reply) {
    const auto operation = submit(1, 0, with_silent);
    worker_loop.step();
    abort_all();
    std::string why;
    worker_loop.events.when_lost = [&](std::uint32_t rank, const std::string& text) {
      if (rank == 1) why = text;
    };
    if (reply) servers[1]->on_message(*controls[1], encode(*reply, 1));
    for (const Deadline limit = Deadline::after(30); why.empty() && !limit.passed();) {
      reactor.loop().turn(std::chrono::milliseconds(10));
      servers[1]->on_message(*controls[1], encode(tensor::Echo{}, 1));
    }
    EXPECT_FALSE(operation->is_done());
    // Server 0 has been lost as well meanwhile: nothing was delivered, and so it has not replied either.
    for (const std::uint32_t node : {0U, 1U}) worker_loop.lose_server(node, "the server is lost");
    for (int i = 0; i < 4; ++i) deliver();
    EXPECT_TRUE(operation->is_done());
    return why;
  }
};

TEST_F(WorkerLoopOwedTest, AServerWhosePostedAnswerDoesNotComeIsLost) {
  const std::string why = lost_after(tensor::Cancelled{.aborted = {}, .answered = {1}, .missing = {}});
  EXPECT_EQ(why.find("an answer that it has posted did not arrive"), 0U) << why;
}

TEST_F(WorkerLoopOwedTest, AServerThatDoesNotReplyToAnAbortIsLost) {
  const std::string why = lost_after(std::nullopt);
  EXPECT_EQ(why.find("it did not reply to an operation that was given up"), 0U) << why;
}

TEST_F(WorkerLoopOwedTest, AServerThatNeverTellsWhatBecameOfAnOperationIsLost) {
  const std::string why = lost_after(tensor::Cancelled{.aborted = {}, .answered = {}, .missing = {}, .pending = {1}});
  EXPECT_EQ(why.find("it did not tell what became of an operation"), 0U) << why;
}

class LoopWithoutCredit : public WorkerLoopTest {
 protected:
  LoopWithoutCredit() : WorkerLoopTest(0) {}
};

TEST_F(LoopWithoutCredit, SendsAllThereIs) {
  const auto operation = submit(300, 0);
  worker_loop.step();
  deliver();
  EXPECT_EQ(pushes(0) + pushes(1), 600U);
  while (!operation->is_done()) {
    worker_loop.step();
    deliver();
  }
}

class LoopWithLargeCredit : public WorkerLoopTest {
 protected:
  LoopWithLargeCredit() : WorkerLoopTest(4000 * kPiece) {}
};

// It sums in the order in which it gets the pushes, so that what is urgent waits for what it has.
TEST_F(LoopWithLargeCredit, GivesAServerInThisProcessLittleAtATime) {
  constexpr std::uint64_t kTurn = 256 + 16;  // pieces: 256 KiB, and the rest of a batch
  const auto slow = submit(2000, -1);
  worker_loop.step();
  EXPECT_TRUE(worker_loop.blocked()) << "it must not sleep";
  deliver();
  EXPECT_LE(pushes(0), kTurn);
  const auto urgent = submit(1, 1);
  worker_loop.step();
  deliver();
  worker_loop.step();
  deliver();
  EXPECT_TRUE(urgent->is_done());
  EXPECT_LE(pushes(0), 3 * kTurn);
  while (!slow->is_done()) {
    worker_loop.step();
    deliver();
  }
  EXPECT_EQ(pushes(0), 2001U);
}

}  // namespace
}  // namespace bps::worker::testing
