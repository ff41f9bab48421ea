// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "core/dtype.h"
#include "van/calls.h"
#include "van/van_fixture.h"

namespace bps::van {
namespace {

using namespace test;

TensorSpec tensor_of(const std::string& name, Dtype dtype = Dtype::kFloat32, std::uint32_t group = 0) {
  return {group, name, static_cast<std::uint8_t>(dtype), 12, "(3, 4)"};
}
std::vector<TensorId> declare(TestNode& node, const std::vector<TensorSpec>& specs) {
  return node->declare(specs);
}

TEST(Barrier, WaitsForTheLast) {
  JointJob job(3);
  std::atomic<int> here{0};
  together(3, [&](std::size_t i) {
    for (int round = 1; round <= 50; ++round) {
      ++here;
      job[i]->barrier(job[i].all(), 10);
      EXPECT_GE(here, 3 * round);
      job[i]->barrier(job[i].all(), 10);
    }
  });
  EXPECT_EQ(job.scheduler->counters().barriers, 100U);
}

TEST(Barrier, TellsAllTheSmallestPartitionSizeThatOneWishesFor) {
  JointJob job(3);
  const std::uint64_t wishes[] = {0, 512 << 10, 64 << 10};
  together(3, [&](std::size_t i) {
    EXPECT_EQ(job[i]->barrier(job[i].all(), 10), 0U);
    EXPECT_EQ(job[i]->barrier(job[i].all(), 10, wishes[i]), 64U << 10);
    EXPECT_EQ(job[i]->barrier(job[i].all(), 10), 64U << 10);
  });
}

TEST(Barrier, ManyThreadsMayCall) {
  JointJob job(2);
  together(8, [&](std::size_t i) {
    for (int round = 0; round < 20; ++round) job[i % 2]->barrier(job[i % 2].all(), 10);
  });
  EXPECT_EQ(job.scheduler->counters().barriers, 80U);
}

TEST(Barrier, TimeOutNamesTheMissingAndIsForgotten) {
  JointJob job(3);
  together({[&] {
    const Thrown thrown = thrown_by([&] { job[1]->barrier(job[1].all(), 0.2); });
    EXPECT_EQ(thrown.code, ErrorCode::kTimeout);
    EXPECT_EQ(thrown.what, "the barrier of group 0 took longer than 0.2 s: ranks 0, 2 did not come");
  }});
  std::atomic<bool> last_came{false};
  together(3, [&](std::size_t i) {
    if (i == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      last_came = true;
    }
    job[i]->barrier(job[i].all(), 10);
    EXPECT_TRUE(last_came) << "the barrier that timed out must not count";
  });
}

TEST(Barrier, AStrangerToTheGroupIsTold) {
  JointJob job(2);
  EXPECT_EQ(thrown_by([&] { job[0]->barrier({7, {0, 1}}, 1); }).code, ErrorCode::kInvalidArgument);
}

TEST(LateRound, AllRanksOfTheGroupAreToldOfDifferentOperations) {
  using enum tensor::OperationKind;
  JointJob job(3);
  job[0]->tell(LateRound{0, 7, 2, kPushPull});
  job[1]->tell(LateRound{0, 7, 1, kReduceScatter});  // an earlier round, which it waits for no more
  job[1]->tell(LateRound{0, 8, 2, kPushPull});
  job[1]->tell(LateRound{9, 7, 2, kReduceScatter});  // there is no such group
  job[1]->tell(LateRound{0, 7, 2, kReduceScatter});
  const std::map<std::uint32_t, std::string> told{
      {7, "ranks disagree in round 2: rank 0 called push_pull, and rank 1 called reduce_scatter"}};
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(eventually([&] { return job[i].rounds() == told; })) << i;
}

TEST(Declare, AllRanksGetTheSameIds) {
  JointJob job(3);
  std::vector<std::vector<TensorId>> ids(3);
  together(3, [&](std::size_t i) {
    ids[i] =
        i == 1 ? declare(job[i], {tensor_of("b"), tensor_of("a")}) : declare(job[i], {tensor_of("a"), tensor_of("b")});
  });
  EXPECT_EQ(ids[0], ids[2]);
  EXPECT_EQ(ids[0][0], ids[1][1]);
  EXPECT_EQ(ids[0][1], ids[1][0]);
  EXPECT_TRUE(declare(job[0], {}).empty());
  EXPECT_EQ(job.scheduler->counters().declared, 6U);
}

TEST(Declare, AMismatchIsToldToAll) {
  JointJob job(3);
  const auto id = declare(job[0], {tensor_of("w")})[0].id;
  declare(job[2], {tensor_of("w")});
  const Thrown thrown = thrown_by([&] { declare(job[1], {tensor_of("w", Dtype::kFloat64)}); });
  EXPECT_EQ(thrown.code, ErrorCode::kMismatch);
  EXPECT_EQ(thrown.what, "tensor 'w' is float32 (3, 4) on rank 0 but float64 (3, 4) on rank 1");
  for (const std::size_t i : {0, 2}) {
    ASSERT_TRUE(eventually([&] { return job[i].failed().size() == 1; }));
    EXPECT_EQ(job[i].failed().at(id), thrown.what);
  }
  EXPECT_TRUE(job[1].failed().empty());
}

TEST(Declare, BadSpecificationsDoNotTravel) {
  JointJob job(1);
  EXPECT_EQ(thrown_by([&] { declare(job[0], {tensor_of("")}); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(thrown_by([&] { declare(job[0], {tensor_of("w", Dtype{99})}); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(job.scheduler->counters().lost, 0U);
}

TEST(Declare, AWholeModelTakesOneRoundTrip) {
  JointJob job(2);
  std::vector<TensorSpec> model;
  for (int i = 0; i < 4000; ++i) model.push_back(tensor_of("decoder.layers." + std::to_string(i) + ".mlp.weight"));
  const auto before = job.scheduler->counters().messages;
  const auto start = now_ns();
  const auto ids = declare(job[0], model);
  const auto took = static_cast<double>(now_ns() - start) / 1e6;
  std::printf("declaring 4000 tensors: %.2f ms\n", took);
  EXPECT_LT(took, 10000);  // about 3 ms; the sanitizers on a busy machine are far from it
  const auto beats = static_cast<std::uint64_t>(took / 500) + 1;  // of each of the two, with what VanOptions say
  EXPECT_LT(job.scheduler->counters().messages - before, 4 + 2 * beats) << "one question; the others are heartbeats";
  EXPECT_EQ(declare(job[1], model), ids);
}

TEST(Declare, AListTooLongForOneMessageIsSplit) {
  // 12 MB take seconds under the thread sanitizer, in which the van says nothing.
  JointJob job(1, [](SchedulerOptions& options) { options.heartbeat_timeout_s = 60; });
  std::vector<TensorSpec> model;
  for (int i = 0; i < 3000; ++i) model.push_back(tensor_of(std::to_string(i) + std::string(4000, 'n')));
  const auto ids = declare(job[0], model);
  ASSERT_EQ(ids.size(), model.size());
  EXPECT_EQ(declare(job[0], {model.back()})[0], ids.back());
}

TEST(Groups, ServersKnowThemBeforeWorkersDo) {
  JointJob job(4);
  std::vector<Group> groups(4);
  together(4, [&](std::size_t i) {
    const bool even = i % 2 == 0;
    groups[i] = job[i]->new_group(even ? std::vector<std::uint32_t>{0, 2} : std::vector<std::uint32_t>{1, 3}, "dp", 10);
    for (std::size_t server = 0; server < 4; ++server) {
      EXPECT_EQ(job[server].groups().at(groups[i].id), groups[i]);
    }
    job[i]->barrier(groups[i], 10);
    declare(job[i], {tensor_of("w", even ? Dtype::kFloat32 : Dtype::kFloat64, groups[i].id)});
  });
  EXPECT_EQ(groups[0], groups[2]);
  EXPECT_NE(groups[0].id, groups[1].id);
  EXPECT_EQ(job[2]->new_group({0, 2}, "dp", 10), groups[0]) << "asked again, answered at once";
}

TEST(Groups, OfPairsAreMadeByTheFirstThatAsks) {
  JointJob job(3);
  const Group pair = job[2]->new_group({1, 2}, std::string(kPairName), 10);  // rank 1 has not asked
  for (std::size_t server = 0; server < 3; ++server) EXPECT_EQ(job[server].groups().at(pair.id), pair);
  EXPECT_EQ(job[1]->new_group({1, 2}, std::string(kPairName), 10), pair);
  EXPECT_NE(job[1]->new_group({0, 1}, std::string(kPairName), 10).id, pair.id);
}

TEST(Groups, TimeOutSaysWhoDidNotAsk) {
  JointJob job(3);
  const Thrown thrown = thrown_by([&] { job[0]->new_group({0, 1, 2}, "tp", 0.2); });
  EXPECT_EQ(thrown.code, ErrorCode::kTimeout);
  EXPECT_EQ(thrown.what, "making the group 'tp' took longer than 0.2 s: ranks 1, 2 did not ask for it");
}

TEST(Groups, RanksThatDisagreeAreTold) {
  JointJob job(3);
  together({[&] { thrown_by([&] { job[1]->new_group({0, 1, 2}, "tp", 1); }); },
            [&] {
              const Thrown thrown = thrown_by([&] { job[0]->new_group({0, 1}, "tp", 0.3); });
              EXPECT_NE(thrown.what.find("a group of the same name is asked for with ranks 0, 1, 2"), std::string::npos)
                  << thrown.what;
            }});
}

TEST(Calls, ServersDoNotTakePart) {
  const auto scheduler = make_scheduler(1, 1);
  TestNode worker({scheduler->port()}), server({scheduler->port()});
  together({[&] { worker.join(0, kNoRank, 1, 1); }, [&] { server.join(kNoRank, 0, 1, 1); }});
  EXPECT_EQ(thrown_by([&] { server->barrier(server.all(), 1); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(thrown_by([&] { declare(server, {tensor_of("w")}); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(worker->new_group({0}, "alone", 10).ranks, std::vector<std::uint32_t>{0});
  EXPECT_EQ(server.groups().size(), 2U);
}

}  // namespace
}  // namespace bps::van
