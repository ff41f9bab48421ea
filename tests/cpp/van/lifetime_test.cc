// SPDX-License-Identifier: Apache-2.0
// Ends: well, early, and in every order of destruction.
#include <cstdio>
#include <filesystem>

#include "van/van_fixture.h"

namespace bps::van {
namespace {

using namespace test;

TEST(Lifetime, AJobThatEndsWell) {
  const auto scheduler = make_scheduler(2, 1);
  TestNode zero({scheduler->port()}), one({scheduler->port()}), server({scheduler->port()});
  together({[&] { zero.join(0, kNoRank, 2, 1); }, [&] { one.join(1, kNoRank, 2, 1); },
            [&] { server.join(kNoRank, 0, 2, 1); }});
  together({[&] { EXPECT_TRUE(zero->leave(10)); }, [&] { EXPECT_TRUE(one->leave(10)); },
            [&] { EXPECT_TRUE(server->wait_for_end()); }});
  EXPECT_TRUE(server->leave(10)) << "a server may say goodbye too";
  EXPECT_TRUE(zero->leave(10)) << "twice is no harm";
  zero.destroy();
  one.destroy();
  server.destroy();
  EXPECT_TRUE(scheduler->wait());
  EXPECT_TRUE(zero.lost().empty());
  EXPECT_EQ(scheduler->counters().lost, 0U);
}

TEST(Lifetime, TheSchedulerMayGoFirstOnceAllHaveLeft) {
  JointJob job(3);
  job.leave_all();
  job.scheduler.reset();
  for (auto& node : job.nodes) {
    EXPECT_TRUE((*node)->wait_for_end());
    EXPECT_TRUE(node->lost().empty());
  }
}

TEST(Lifetime, TheHostOfTheSchedulerNeedNotWaitForTheOthers) {
  for (int round = 0; round < 20; ++round) {
    JointJob job(3);
    together(3, [&](std::size_t i) {
      EXPECT_TRUE(job[i]->leave(10));
      job[i].destroy();
      if (i == 0) job.scheduler.reset();
    });
    for (auto& node : job.nodes) EXPECT_TRUE(node->lost().empty());
  }
}

TEST(Lifetime, NothingIsLeftOpen) {
  const auto open_files = [] {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return std::distance(begin(files), end(files));
  };
  const auto before = open_files();
  for (int round = 0; round < 20; ++round) {
    JointJob job(2);
    if (round % 2 == 0) job.leave_all();
    if (round % 3 == 0) job.scheduler.reset();
  }
  EXPECT_EQ(open_files(), before);
}

TEST(Lifetime, UnusedVansAndSchedulers) {
  {
    TestNode never_joined({1});
  }
  {
    make_scheduler(4, 4);
  }
  const auto scheduler = make_scheduler(2, 0);
  scheduler->stop();
  EXPECT_FALSE(scheduler->wait());
  EXPECT_FALSE(scheduler->wait()) << "and again";
}

TEST(Lifetime, StopEndsARunningJob) {
  JointJob job(2);
  job.scheduler->stop();
  EXPECT_FALSE(job.scheduler->wait());
  EXPECT_FALSE(job[0]->wait_for_end());
}

TEST(Lifetime, EveryOrderOfDestruction) {
  for (int order = 0; order < 6; ++order) {
    JointJob job(2);
    if (order >= 3) job.leave_all();
    if (order % 3 == 0) job.scheduler.reset();
    job[order % 2 == 0 ? 1 : 0].destroy();
    if (order % 3 == 1) job.scheduler.reset();
    job[order % 2 == 0 ? 0 : 1].destroy();
  }
}

TEST(Lifetime, EventsMayTellTheScheduler) {
  const auto scheduler = make_scheduler(1, 1);
  std::atomic<int> ran{0};
  {
    Van* self = nullptr;
    Van van({.scheduler_host = "127.0.0.1", .scheduler_ports = {scheduler->port()}}, kJob,
            {.on_lost = nullptr,
             .on_left = nullptr,
             .on_reachable = nullptr,
             .on_group = [&](const Group&, const auto&) { self->tell(Heartbeat{}), ++ran; },
             .on_tensor_failed = nullptr});
    self = &van;
    Node node;
    node.worker_rank = node.server_rank = kAnyRank;
    node.worker_loops = node.server_loops = 1;
    van.join(node, 1, 1);
    EXPECT_TRUE(eventually([&] { return ran == 1; }));
    EXPECT_TRUE(van.leave(10));
  }
  EXPECT_TRUE(scheduler->wait());
}

TEST(Lifetime, FourMembersComeAndGoQuickly) {
  const auto start = now_ns();
  {
    JointJob job(4);
    const auto joined = now_ns();
    std::printf("join of 4: %.2f ms\n", static_cast<double>(joined - start) / 1e6);
    together(4, [&](std::size_t i) {
      for (int round = 0; round < 500; ++round) job[i]->barrier(job[i].all(), 10);
    });
    std::printf("barrier of 4: %.1f us\n", static_cast<double>(now_ns() - joined) / 500e3);
    job.leave_all();
  }
  EXPECT_LT(now_ns() - start, 20'000'000'000U);
}

}  // namespace
}  // namespace bps::van
