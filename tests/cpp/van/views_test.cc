// SPDX-License-Identifier: Apache-2.0
// From one view to the next, as the scheduler decides it.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "tensor/key_map.h"
#include "van/views_simulation.h"

namespace bps::van {
namespace {

using test::SimulatedMember;
using test::Simulation;

void renew_all(Simulation& job) {
  for (SimulatedMember& member : job.members()) {
    if (job.may_renew(member)) job.renew(member);
  }
}

// All who are alive are in one view, in their old order.
void expect_one_view(Simulation& job) {
  const auto alive = job.alive();
  std::vector<std::int32_t> worker_ranks;
  std::vector<std::int32_t> server_ranks;
  for (const SimulatedMember* member : alive) {
    EXPECT_EQ(member->epoch, alive.front()->epoch);
    EXPECT_FALSE(member->told);
    if (!member->dedicated) worker_ranks.push_back(member->node.worker_rank);
    if (member->node.server_rank >= 0) server_ranks.push_back(member->node.server_rank);
  }
  for (std::size_t i = 0; i < worker_ranks.size(); ++i) EXPECT_EQ(worker_ranks[i], static_cast<std::int32_t>(i));
  std::ranges::sort(server_ranks);
  for (std::size_t i = 0; i < server_ranks.size(); ++i) EXPECT_EQ(server_ranks[i], static_cast<std::int32_t>(i));
  for (const SimulatedMember* member : alive) EXPECT_EQ(member->workers, worker_ranks.size());
}

// Workers that are refused end, and servers then hear of that.
void expect_end_for_all(Simulation& job) {
  const auto knows = [](const SimulatedMember* one) { return one->refused || one->over || !one->told; };
  for (const SimulatedMember* member : job.alive()) EXPECT_TRUE(member->dedicated || knows(member)) << member->pid;
  for (SimulatedMember* member : job.alive()) {
    if (!member->dedicated) job.kill(*member);
  }
  for (const SimulatedMember* server : job.alive()) EXPECT_TRUE(knows(server)) << server->pid;
}

TEST(Views, SurvivorsCloseUpAndKeepTheirOrder) {
  Simulation job(1, 4, 0, 2);
  job.kill(job.members()[1]);
  for (const std::size_t i : {3, 0, 2}) {
    EXPECT_TRUE(job.members()[i].told);
    EXPECT_EQ(job.members()[i].lost, std::vector<std::uint32_t>{2}) << "by its number in the view that has ended";
    job.renew(job.members()[i]);
  }
  expect_one_view(job);
  EXPECT_EQ(job.members()[2].node.worker_rank, 1);
  EXPECT_EQ(job.members()[2].node.identity, 102);
  EXPECT_EQ(job.members()[2].epoch, 2);
}

// It stays for those whom its server may have to serve.
TEST(Views, WhoHasLeftBeforeALossWaitsForNobodyInTheNextView) {
  Simulation job(1, 3, 0, 1);
  SimulatedMember& leaves = job.members()[2];
  leaves.waits = true;  // for the reply
  EXPECT_TRUE(job.job().receive(leaves.peer, Leave{.call = 1, .lost_node = 0, .reason = "", .failure = ""}));
  EXPECT_FALSE(leaves.over);
  job.kill(job.members()[0]);
  EXPECT_TRUE(leaves.over);
  EXPECT_FALSE(job.members()[1].over);
}

TEST(Views, WithoutAMinimumALossEndsTheJob) {
  Simulation job(1, 3, 0, 0);
  job.kill(job.members()[1]);
  EXPECT_FALSE(job.members()[0].told);
  EXPECT_EQ(job.members()[0].lost, std::vector<std::uint32_t>{2});
}

TEST(Views, TooFewAreRefusedWithTheReason) {
  Simulation job(1, 3, 0, 2);
  job.kill(job.members()[0]);
  job.renew(job.members()[1]);
  job.kill(job.members()[2]);
  ASSERT_TRUE(job.members()[1].refused);
  EXPECT_EQ(job.members()[1].refused->code, ErrorCode::kPeerLost);
  EXPECT_NE(job.members()[1].refused->text.find("pid 100"), std::string::npos) << job.members()[1].refused->text;
}

// They may leave as they should, which it hears where it was before.
TEST(Views, AServerIsNotRefusedForWantOfWorkers) {
  for (const std::size_t before : {0, 1, 2}) {
    Simulation job(1, 3, 1, 2);
    SimulatedMember& server = job.members()[3];
    job.kill(job.members()[0]);
    for (const std::size_t i : {0, 1, 2}) {
      if (i == before) job.renew(server);
      if (i != 0) job.leave(job.members()[i], "");
    }
    EXPECT_FALSE(server.refused) << before << ": " << server.refused->text;
    EXPECT_TRUE(server.over) << before;
  }
}

TEST(Views, WhoWaitsToEnterHearsThatAllWorkersHaveLeft) {
  for (const bool lost : {false, true}) {
    Simulation job(1, 2, 0, 1);
    const SimulatedMember& entering = job.add(false);
    lost ? job.kill(job.members()[0]) : job.leave(job.members()[0], "");
    EXPECT_FALSE(entering.refused);
    job.leave(job.members()[1], "");
    EXPECT_TRUE(entering.refused);
  }
}

TEST(Views, WhoComesTooLateIsNamed) {
  Simulation job(1, 3, 0, 1);
  job.kill(job.members()[0]);
  job.renew(job.members()[1]);
  ASSERT_TRUE(job.job().join_deadline());
  job.job().give_up();
  job.deliver();
  ASSERT_TRUE(job.members()[1].refused);
  EXPECT_EQ(job.members()[1].refused->code, ErrorCode::kTimeout);
  EXPECT_NE(job.members()[1].refused->text.find("pid 102"), std::string::npos) << job.members()[1].refused->text;
  job.renew(job.members()[2]);
  EXPECT_TRUE(job.members()[2].refused) << "it is not kept waiting for a view that cannot begin";
}

TEST(Views, AProcessThatWasNotInTheViewIsRefused) {
  Simulation job(1, 3, 0, 1);
  job.kill(job.members()[0]);
  SimulatedMember& impostor = job.members()[0];
  impostor.alive = true;  // the dead one's number
  impostor.peer = 0;
  job.renew(impostor);
  ASSERT_TRUE(impostor.refused);
  EXPECT_EQ(job.job().phase(), Job::Phase::kRenewing);
}

TEST(Views, ANewProcessEntersAtTheEndOfAStep) {
  Simulation job(1, 2, 0, 1);
  SimulatedMember& entering = job.add(false);
  EXPECT_FALSE(job.members()[0].told) << "in the middle of a step";
  job.end_step();
  for (const std::size_t i : {1, 0}) {
    EXPECT_TRUE(job.members()[i].told);
    job.renew(job.members()[i]);
  }
  expect_one_view(job);
  EXPECT_EQ(entering.node.worker_rank, 2) << "after the others";
  EXPECT_EQ(entering.epoch, 2);
  EXPECT_EQ(job.members()[1].node.worker_rank, 1);
}

TEST(Views, ANewProcessTakesThePlaceOfALostOne) {
  Simulation job(1, 3, 0, 1);
  job.kill(job.members()[0]);
  SimulatedMember& entering = job.add(false);
  job.renew(job.members()[2]);
  job.renew(job.members()[1]);
  expect_one_view(job);
  EXPECT_EQ(entering.node.worker_rank, 2);
  EXPECT_EQ(job.members()[1].node.worker_rank, 0);
}

TEST(Views, ANewServerEntersAtOnce) {
  Simulation job(1, 2, 1, 1);
  SimulatedMember& entering = job.add(true);
  EXPECT_TRUE(job.members()[0].told);
  for (std::size_t i = 0; i < 3; ++i) job.renew(job.members()[i]);
  expect_one_view(job);
  EXPECT_EQ(entering.node.server_rank, 1);
}

// Its patience is its own: what the members wait for has another deadline.
TEST(Views, WhoWaitsToEnterDoesNotEndTheJobWithItsPatience) {
  Simulation job(1, 2, 0, 1);
  SimulatedMember& entering = job.add(false, std::chrono::milliseconds(50));
  job.end_step();
  ASSERT_EQ(job.job().phase(), Job::Phase::kRenewing);
  job.renew(job.members()[0]);
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  ASSERT_LE(*job.job().join_deadline(), Clock::now());
  job.job().give_up();
  job.deliver();
  EXPECT_EQ(entering.refused.value().code, ErrorCode::kTimeout);
  EXPECT_FALSE(job.members()[0].refused) << job.members()[0].refused->text;
  job.renew(job.members()[1]);
  EXPECT_EQ(job.job().phase(), Job::Phase::kRunning);
  EXPECT_EQ(job.members()[0].membership.workers, 2U);
}

TEST(Views, ServersKeepTheirSlots) {
  Simulation job(1, 1, 3, 1);
  const auto slots = [&] { return job.members()[0].membership.server_of_slot(); };
  EXPECT_EQ(slots(), (std::vector<std::uint32_t>{0, 1, 2}));
  job.kill(job.members()[2]);
  for (const std::size_t i : {3, 0, 1}) job.renew(job.members()[i]);
  EXPECT_EQ(slots(), (std::vector<std::uint32_t>{0, tensor::kNoServer, 1}));
  job.replace_scheduler();  // it knows them from the members
  for (const std::size_t i : {1, 3, 0}) job.rejoin(job.members()[i]);
  for (const std::size_t i : {3, 0, 1}) job.renew(job.members()[i]);
  EXPECT_EQ(slots(), (std::vector<std::uint32_t>{0, tensor::kNoServer, 1}));
  job.add(true);
  for (const std::size_t i : {3, 0, 1}) job.renew(job.members()[i]);
  EXPECT_EQ(slots(), (std::vector<std::uint32_t>{0, 2, 1})) << "whoever enters takes the place of the lost one";
}

// Deaths, departures, entries and returns in any order: at the end all who live are in one view, or all know that there
// is none.
TEST(Views, AnyOrderOfEventsEndsWellOrForAll) {
  int renewed = 0;
  int refused = 0;
  for (std::uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 generator(seed);
    const auto shape = [&](std::uint32_t below) { return static_cast<std::uint32_t>(generator() % below); };
    const std::uint32_t workers = 2 + shape(5);
    const std::uint32_t dedicated = shape(3);
    Simulation job(seed, workers, dedicated, 1 + shape(workers));
    for (int i = 0; i < 12; ++i) {
      const auto alive = job.alive();
      if (alive.empty() || job.job().phase() == Job::Phase::kOver) break;
      SimulatedMember& member = *alive[job.draw(static_cast<std::uint32_t>(alive.size()))];
      switch (job.draw(8)) {
        case 6: job.end_step(); break;
        case 7:
          if (job.draw(2) == 0) job.add(dedicated > 0 && job.draw(2) == 0);
          break;
        case 0: job.kill(member); break;
        case 1:
          if (member.next == 0 && job.draw(3) == 0) job.leave(member, job.draw(2) == 0 ? "" : "ValueError");
          break;
        default:
          if (job.may_renew(member)) job.renew(member);
      }
    }
    for (int i = 0; i < 3; ++i) renew_all(job);
    const bool over =
        std::ranges::any_of(job.alive(), [](const SimulatedMember* one) { return one->refused.has_value(); });
    const bool ended = job.job().phase() == Job::Phase::kOver;
    if (over || ended) {
      refused += over;
      expect_end_for_all(job);
    } else if (std::ranges::any_of(job.alive(), [](const SimulatedMember* one) { return one->epoch > 1; })) {
      ++renewed;
      // Who has left without a reason is missed by nobody until the next loss.
      if (job.job().phase() == Job::Phase::kRunning) {
        for (const SimulatedMember* member : job.alive()) EXPECT_FALSE(member->told);
      }
    }
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(renewed, 100);
  EXPECT_GT(refused, 100);
}

// ---- The scheduler is lost, and another one takes its place

void rejoin_all(Simulation& job) {
  for (SimulatedMember& member : job.members()) {
    if (job.may_rejoin(member)) job.rejoin(member);
  }
}

TEST(LostScheduler, MembersGoOnInTheNextView) {
  Simulation job(1, 3, 1, 2);
  job.replace_scheduler();
  rejoin_all(job);
  EXPECT_EQ(job.job().phase(), Job::Phase::kRenewing);
  renew_all(job);
  expect_one_view(job);
  EXPECT_EQ(job.members()[0].epoch, 2);
}

TEST(LostScheduler, ABarrierThatEndedForSomeEndsForAll) {
  for (std::size_t answers = 0; answers <= 3; ++answers) {
    SCOPED_TRACE(answers);
    Simulation job(1, 3, 0, 2);
    job.let_scheduler_die(answers);
    job.end_step();
    if (answers == 3) job.replace_scheduler();
    rejoin_all(job);
    EXPECT_EQ(job.steps().at(1), std::set<std::uint64_t>{answers == 0 ? 0U : 1U});
    renew_all(job);
    expect_one_view(job);
  }
}

TEST(LostScheduler, WhoDoesNotComeBackIsLost) {
  Simulation job(1, 4, 0, 2);
  job.replace_scheduler();
  job.kill(job.members()[2]);
  rejoin_all(job);
  EXPECT_EQ(job.job().phase(), Job::Phase::kReuniting) << "it may come yet";
  EXPECT_FALSE(job.members()[0].told);
  job.end_reunion();
  EXPECT_EQ(job.members()[0].lost, std::vector<std::uint32_t>{3});
  renew_all(job);
  expect_one_view(job);
  EXPECT_EQ(job.members()[3].node.worker_rank, 2);
}

TEST(LostScheduler, TooFewAreRefused) {
  Simulation job(1, 3, 0, 3);
  job.replace_scheduler();
  job.kill(job.members()[1]);
  rejoin_all(job);
  job.end_reunion();
  renew_all(job);
  expect_end_for_all(job);
  EXPECT_NE(job.members()[0].refused->text.find("did not come back"), std::string::npos);
}

TEST(LostScheduler, TheViewThatSomeHaveBeenWelcomedToCounts) {
  Simulation job(1, 3, 0, 2);
  job.kill(job.members()[0]);
  job.renew(job.members()[1]);
  job.let_scheduler_die(1);  // one Welcome arrives
  job.renew(job.members()[2]);
  EXPECT_EQ(job.members()[1].epoch, 2);
  EXPECT_EQ(job.members()[2].epoch, 1);
  job.rejoin(job.members()[2]);
  EXPECT_EQ(job.job().phase(), Job::Phase::kReuniting) << "as far as it knows two others are missing";
  job.rejoin(job.members()[1]);
  renew_all(job);
  expect_one_view(job);
  EXPECT_EQ(job.members()[1].epoch, 3);
}

// No tables for calls exist in such a job.
TEST(LostScheduler, ACallAfterTheJobHasEndedWithoutAnotherViewIsIgnored) {
  Simulation job(1, 2, 0, 1);
  job.replace_scheduler();
  rejoin_all(job);
  for (const SimulatedMember& member : job.members()) {
    (void)job.job().receive(member.peer, Leave{.call = 1, .lost_node = 0, .reason = "", .failure = ""});
  }
  job.job().tell_departed();
  ASSERT_EQ(job.job().phase(), Job::Phase::kOver);
  EXPECT_TRUE(job.job().receive(job.members()[0].peer, Barrier{.call = 2}));
}

TEST(LostScheduler, OneThatTellsOfAnotherViewIsRefused) {
  Simulation job(1, 3, 0, 2);
  job.replace_scheduler();
  job.rejoin(job.members()[0]);
  job.members()[1].membership.nodes[0].pid = 1;
  job.rejoin(job.members()[1]);
  ASSERT_TRUE(job.members()[1].refused);
  EXPECT_FALSE(job.members()[0].refused);
}

// As above, and the scheduler dies, too: in the middle of what it tells, and while members come back.
TEST(LostScheduler, AnyOrderOfEventsEndsWellOrForAll) {
  int renewed = 0;
  int refused = 0;
  for (std::uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 generator(seed);
    const auto shape = [&](std::uint32_t below) { return static_cast<std::uint32_t>(generator() % below); };
    const std::uint32_t workers = 2 + shape(5);
    const std::uint32_t dedicated = shape(3);
    Simulation job(seed, workers, dedicated, 1 + shape(workers));
    for (int i = 0; i < 20; ++i) {
      const auto alive = job.alive();
      if (alive.empty() || job.job().phase() == Job::Phase::kOver) break;
      SimulatedMember& member = *alive[job.draw(static_cast<std::uint32_t>(alive.size()))];
      switch (job.draw(10)) {
        case 0: job.end_step(); break;
        case 1:
          if (job.draw(3) == 0) job.kill(member);
          break;
        case 2: job.replace_scheduler(); break;
        case 3: job.let_scheduler_die(job.draw(workers + 2)); break;
        case 4:
          if (job.draw(4) == 0) job.end_reunion();
          break;
        case 5:
        case 6: rejoin_all(job); break;
        default:
          if (job.may_rejoin(member)) job.rejoin(member);
          if (job.may_renew(member)) job.renew(member);
      }
    }
    job.let_scheduler_die(1U << 20);
    for (int i = 0; i < 3; ++i) {
      rejoin_all(job);
      job.end_reunion();
      renew_all(job);
    }
    for (const auto& [epoch, steps] : job.steps()) {
      EXPECT_EQ(steps.size(), 1) << "members of view " << epoch << " differ in the steps that have ended";
    }
    const bool over = std::ranges::any_of(job.alive(), [](const auto* one) { return one->refused.has_value(); });
    // Below the minimum the loss is told, and the job ends by itself.
    const bool fails =
        std::ranges::any_of(job.alive(), [](const auto* one) { return !one->told && !one->lost.empty(); });
    if (fails) continue;
    if (over || job.job().phase() == Job::Phase::kOver) {
      ++refused;
      expect_end_for_all(job);
    } else if (!job.alive().empty() && job.alive().front()->epoch > 1) {
      ++renewed;
      expect_one_view(job);
    }
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(renewed, 1000);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace bps::van
