// SPDX-License-Identifier: Apache-2.0
// A job whose workers leave to come back, as the scheduler decides it.
#include <gtest/gtest.h>

#include <algorithm>

#include "van/views_simulation.h"

namespace bps::van {
namespace {

using test::SimulatedMember;
using test::Simulation;

// Two workers and two dedicated servers; the workers have suspended the job.
class Suspended : public ::testing::Test {
 protected:
  void suspend() {
    for (SimulatedMember& member : job.members()) {
      if (member.alive && !member.dedicated) job.leave(member, "", true);
    }
  }
  void renew_servers() {
    for (SimulatedMember& member : job.members()) {
      if (job.may_renew(member)) job.renew(member);
    }
  }
  // Everybody who is alive and not told that the job is over, or to do without it, is in one view.
  void expect_view(std::uint32_t workers, std::uint32_t servers, std::uint32_t epoch) {
    EXPECT_EQ(job.job().phase(), Job::Phase::kRunning);
    for (const SimulatedMember* member : job.alive()) {
      if (member->over) continue;
      EXPECT_EQ(member->membership.workers, workers) << member->pid;
      EXPECT_EQ(member->membership.servers, servers) << member->pid;
      EXPECT_EQ(member->epoch, epoch) << member->pid;
      EXPECT_FALSE(member->refused) << member->refused->text;
    }
  }
  SimulatedMember& server(std::size_t i) { return job.members()[2 + i]; }

  Simulation job{1, 2, 2, 0};
};

TEST_F(Suspended, TheServersWaitAndKeepTheirRanks) {
  job.leave(job.members()[0], "", true);
  EXPECT_EQ(job.job().phase(), Job::Phase::kRunning) << "the other worker is still here";
  EXPECT_FALSE(server(0).told);
  job.leave(job.members()[1], "", true);
  EXPECT_TRUE(server(0).told && server(1).told);
  job.renew(server(1));
  job.renew(server(0));
  EXPECT_EQ(job.job().phase(), Job::Phase::kSuspended);
  job.resume(1, 2, 2);
  job.resume(0, 2, 2);
  expect_view(2, 2, 2);
  EXPECT_EQ(server(0).node.server_rank, 0);
  EXPECT_EQ(server(1).node.server_rank, 1);
  suspend();
  job.resume(0, 1, 2);  // before the servers are back
  renew_servers();
  expect_view(1, 2, 3);
}

TEST_F(Suspended, TheWorkersThatComeSayHowManyThereAre) {
  suspend();
  renew_servers();
  job.resume(0, 3, 2);
  const SimulatedMember& wrong = job.resume(1, 2, 2);
  ASSERT_TRUE(wrong.refused);
  EXPECT_NE(wrong.refused->text.find("others that resume the job expect 3 workers and 2 servers"), std::string::npos)
      << wrong.refused->text;
  job.members().back().alive = false;
  EXPECT_NE(job.job().dump().find("1 of 3 workers joined; missing ranks 1, 2"), std::string::npos) << job.job().dump();
  job.resume(2, 3, 2);
  job.resume(1, 3, 2);
  expect_view(3, 2, 2);
}

TEST_F(Suspended, NumbersOfAWorkerThatGoesAwayAreForgotten) {
  suspend();
  renew_servers();
  job.kill(job.resume(0, 7, 7));
  EXPECT_NE(job.job().dump().find("no worker has resumed the job"), std::string::npos) << job.job().dump();
  job.resume(0, 1, 2);
  expect_view(1, 2, 2);
}

TEST_F(Suspended, ARankThatDoesNotExistIsRefused) {
  suspend();
  EXPECT_NE(job.resume(1, 1, 2).refused.value().text.find("the job has 1 worker and 2 servers"), std::string::npos);
  EXPECT_EQ(job.resume(0, 0, 2).refused.value().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(job.resume(0, 1, 1U << 31).refused.value().code, ErrorCode::kInvalidArgument);
}

TEST_F(Suspended, FewerServersAreWanted) {
  suspend();
  renew_servers();
  job.resume(0, 1, 1);
  EXPECT_TRUE(server(1).over) << "the last one";
  EXPECT_FALSE(server(0).over);
  expect_view(1, 1, 2);
}

TEST_F(Suspended, OneThatComesTooLateIsNotWanted) {
  suspend();
  job.renew(server(1));
  job.resume(0, 1, 1);
  EXPECT_TRUE(server(0).over);
  expect_view(1, 1, 2);
  EXPECT_EQ(server(1).node.server_rank, 0) << "ranks count from 0";
}

TEST_F(Suspended, MoreServersAreWantedThanThereAre) {
  suspend();
  renew_servers();
  job.kill(server(0));
  job.resume(0, 1, 3);
  EXPECT_EQ(job.job().phase(), Job::Phase::kSuspended);
  job.resume(kNoRank, 2, 2);  // its own numbers are those of its start
  job.resume(kNoRank, 2, 2);
  expect_view(1, 3, 2);
  EXPECT_EQ(server(1).node.server_rank, 1);
}

TEST_F(Suspended, AServerIsLostWhileItWaits) {
  suspend();
  job.kill(server(0));
  job.renew(server(1));
  EXPECT_EQ(job.job().counts().lost, 1U);
  job.resume(0, 1, 2);
  job.resume(kNoRank, 2, 2);
  expect_view(1, 2, 2);
}

TEST_F(Suspended, AServerMayJoinTwice) {
  suspend();
  job.renew(server(0));
  job.job().closed(server(0).next, "its network failed");
  server(0).next = 0;
  job.renew(server(0));
  job.renew(server(1));
  job.resume(0, 1, 2);
  expect_view(1, 2, 2);
  EXPECT_EQ(job.job().counts().lost, 0U);
}

TEST_F(Suspended, OneWordIsEnough) {
  job.leave(job.members()[0], "");
  job.leave(job.members()[1], "", true);
  EXPECT_TRUE(server(0).told);
  EXPECT_FALSE(server(0).over);
}

TEST_F(Suspended, AWorkerMayComeBackBeforeTheOthersHaveLeft) {
  job.leave(job.members()[0], "", true);
  const SimulatedMember& early = job.resume(0, 1, 2);
  EXPECT_FALSE(early.refused) << "it tries again";
  EXPECT_EQ(early.next, 0U);
}

TEST_F(Suspended, AfterALossTheOthersMayComeBack) {
  job.kill(job.members()[1]);
  job.leave(job.members()[0], "rank 1 was lost", true);
  renew_servers();
  job.resume(0, 1, 2);
  expect_view(1, 2, 2);
}

TEST_F(Suspended, NobodyResumesIt) {
  suspend();
  job.renew(server(0));
  ASSERT_TRUE(job.job().join_deadline());
  job.job().give_up();
  job.deliver();
  EXPECT_TRUE(server(0).over && server(1).over);
  EXPECT_EQ(job.job().phase(), Job::Phase::kOver);
  EXPECT_TRUE(job.job().ended_well()) << "all workers had left as they should";
}

TEST_F(Suspended, NotAllComeBack) {
  suspend();
  renew_servers();
  const SimulatedMember& one = job.resume(0, 2, 2);
  ASSERT_TRUE(job.job().join_deadline());
  EXPECT_LT(*job.job().join_deadline(), Clock::now() + std::chrono::minutes(5)) << "as in any job that gathers";
  job.job().give_up();
  job.deliver();
  EXPECT_NE(one.refused.value().text.find("missing rank 1"), std::string::npos) << one.refused->text;
  EXPECT_TRUE(server(0).over);
  EXPECT_FALSE(job.job().ended_well());
}

TEST_F(Suspended, WhatItsLastViewSaysIsNotHeard) {
  suspend();
  renew_servers();
  EXPECT_TRUE(job.job().receive(server(0).peer, GroupAck{1}));
  EXPECT_TRUE(job.job().receive(server(0).peer, Heartbeat{}));
  EXPECT_TRUE(job.job().waits(server(0).peer) && job.job().waits(server(0).next)) << "it may be stopped";
  job.resume(0, 1, 2);
  EXPECT_FALSE(job.job().waits(server(0).peer));
}

TEST(SuspendedViews, AJobThatSurvivesLossesIsSuspendedToo) {
  Simulation job(1, 2, 2, 1);
  SimulatedMember& entering = job.add(false);
  for (const std::size_t i : {0, 1}) job.leave(job.members()[i], "", true);
  EXPECT_FALSE(job.job().waits(entering.next)) << "its connection is closed: it tries again";
  job.members().back().alive = false;
  for (const std::size_t i : {2, 3}) job.renew(job.members()[i]);
  job.resume(0, 2, 2);
  job.resume(1, 2, 2);
  EXPECT_EQ(job.members()[2].epoch, 2U);
  job.kill(job.members()[3]);
  EXPECT_EQ(job.job().phase(), Job::Phase::kRenewing) << "losses are survived as before";
}

TEST(SuspendedViews, TheLastWorkerSuspendsTheJobInsteadOfGoingOn) {
  Simulation job(1, 2, 2, 1);
  job.kill(job.members()[1]);
  job.renew(job.members()[2]);  // waits for a view that does not begin
  job.leave(job.members()[0], "rank 1 was lost", true);
  EXPECT_FALSE(job.members()[2].refused) << job.members()[2].refused->text;
  job.members()[2].next = 0;  // closed: it tries again
  for (const std::size_t i : {2, 3}) job.renew(job.members()[i]);
  job.resume(0, 1, 2);
  for (const std::size_t i : {2, 3}) EXPECT_EQ(job.members()[i].epoch, 3U);
}

TEST(SuspendedViews, TooFewWorkersForTheNextViewMaySuspendTheJob) {
  Simulation job(1, 3, 2, 2);
  job.kill(job.members()[0]);
  job.renew(job.members()[3]);  // waits for a view that does not begin
  job.leave(job.members()[1], "", true);
  job.renew(job.members()[4]);
  job.leave(job.members()[2], "", true);
  for (const std::size_t i : {3, 4}) {
    ASSERT_FALSE(job.members()[i].refused) << job.members()[i].refused->text;
    EXPECT_EQ(job.members()[i].next, 0U) << "its connection is closed: it tries again";
    job.renew(job.members()[i]);
  }
  job.resume(0, 1, 2);
  for (const std::size_t i : {3, 4}) EXPECT_EQ(job.members()[i].epoch, 3U);
}

TEST(SuspendedViews, ServersInsideTheWorkersComeWithThem) {
  Simulation job(1, 2, 0, 0);
  for (const std::size_t i : {0, 1}) job.leave(job.members()[i], "", true);
  for (const std::int32_t rank : {2, 0, 1}) job.resume(rank, 3, 3);
  for (const SimulatedMember* member : job.alive()) {
    EXPECT_EQ(member->workers, 3U);
    EXPECT_EQ(member->node.worker_rank, member->node.server_rank);
  }
}

}  // namespace
}  // namespace bps::van
