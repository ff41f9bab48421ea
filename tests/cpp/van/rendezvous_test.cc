// SPDX-License-Identifier: Apache-2.0
#include "van/rendezvous.h"

#include <gtest/gtest.h>

namespace bps::van {
namespace {

Join wish(std::int32_t worker, std::int32_t server, std::uint32_t workers, std::uint32_t servers) {
  Node node{.worker_rank = worker,
            .server_rank = server,
            .worker_loops = 1,
            .server_loops = 1,
            .pid = 42,
            .host = "a",
            .host_key = "",
            .addresses = {}};
  return {node, workers, servers, 1000};
}

TEST(Rendezvous, GrantsWishesInAnyOrder) {
  Rendezvous rendezvous(3, 1);
  EXPECT_FALSE(rendezvous.add(10, wish(2, kNoRank, 3, 1)));
  EXPECT_FALSE(rendezvous.add(11, wish(kNoRank, 0, 3, 1)));
  EXPECT_FALSE(rendezvous.add(12, wish(0, kNoRank, 3, 1)));
  EXPECT_FALSE(rendezvous.complete());
  EXPECT_FALSE(rendezvous.add(13, wish(1, kNoRank, 3, 1)));
  ASSERT_TRUE(rendezvous.complete());
  const auto [members, peers] = rendezvous.seat();
  EXPECT_TRUE(members.is_consistent());
  EXPECT_EQ(peers, (std::vector<Peer>{12, 13, 10, 11}));
}

TEST(Rendezvous, AProcessWithoutLoopsIsRefused) {
  Rendezvous rendezvous(1, 1);
  for (const bool worker : {true, false}) {
    Join join = worker ? wish(0, kNoRank, 1, 1) : wish(kNoRank, 0, 1, 1);
    (worker ? join.node.worker_loops : join.node.server_loops) = 0;
    const auto refused = rendezvous.add(10, join);
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(refused->text, "this process has no loop to work on");
  }
  Join join = wish(0, kNoRank, 1, 1);
  join.node.may_serve = true;
  join.node.server_loops = 0;
  EXPECT_TRUE(rendezvous.add(10, join)) << "it would be made a server that sums nothing";
  EXPECT_TRUE(rendezvous.empty());
}

TEST(Rendezvous, TheIdentityOfAnotherIsRefused) {
  Rendezvous rendezvous(3, 0);
  const auto join = [&](Peer peer, std::int32_t rank, std::uint64_t identity) {
    Join asked = wish(rank, kNoRank, 3, 0);
    asked.node.identity = identity;
    return rendezvous.add(peer, asked);
  };
  EXPECT_FALSE(join(10, 0, 7));
  const auto refused = join(11, 1, 7);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->text, "a member of the job has the identity of this process");
  EXPECT_FALSE(join(12, 1, 8));
  rendezvous.remove(10);
  EXPECT_FALSE(join(13, 0, 7)) << "it is gone";
}

// Thousands join: what is taken is remembered, also when some are gone again.
TEST(Rendezvous, ManyJoinAndSomeAreGone) {
  constexpr std::int32_t kMany = 5000;
  Rendezvous rendezvous(kMany, 1);
  for (std::int32_t rank = 0; rank < kMany; ++rank) {
    ASSERT_FALSE(rendezvous.add(static_cast<Peer>(rank + 1), wish(rank, kNoRank, kMany, 1)));
  }
  ASSERT_FALSE(rendezvous.add(kMany + 1, wish(kNoRank, 0, kMany, 1)));
  ASSERT_TRUE(rendezvous.complete());
  rendezvous.remove(8);
  rendezvous.remove(kMany + 1);
  EXPECT_FALSE(rendezvous.complete());
  EXPECT_EQ(rendezvous.missing(),
            "4999 of 5000 workers joined; missing rank 7; 0 of 1 server joined; missing server rank 0");
  EXPECT_TRUE(rendezvous.add(kMany + 2, wish(6, kNoRank, kMany, 1))) << "taken";
  EXPECT_FALSE(rendezvous.add(kMany + 3, wish(7, kNoRank, kMany, 1)));
  EXPECT_FALSE(rendezvous.add(kMany + 4, wish(kNoRank, kAnyRank, kMany, 1)));
  ASSERT_TRUE(rendezvous.complete());
  const auto [members, peers] = rendezvous.seat();
  EXPECT_TRUE(members.is_consistent());
  EXPECT_EQ(peers[7], kMany + 3);
}

TEST(Rendezvous, WhoWasLostIsNamedUntilAnotherOneComesInItsPlace) {
  Rendezvous rendezvous(3, 0);
  for (const std::int32_t rank : {0, 1, 2}) {
    ASSERT_FALSE(rendezvous.add(static_cast<Peer>(rank + 1), wish(rank, kNoRank, 3, 0)));
  }
  const std::string one = rendezvous.lose(2, "connection closed"), two = rendezvous.lose(3, "silent");
  EXPECT_EQ(one.substr(0, 10), "worker 1 (");
  EXPECT_EQ(rendezvous.lose(3, "silent"), "") << "it was lost before";
  const std::string lost_two = "; " + two + " had joined and was lost: silent";
  EXPECT_EQ(rendezvous.missing(), "1 of 3 workers joined; missing ranks 1, 2; " + one +
                                      " had joined and was lost: connection closed" + lost_two);
  ASSERT_FALSE(rendezvous.add(4, wish(1, kNoRank, 3, 0)));
  EXPECT_EQ(rendezvous.missing(), "2 of 3 workers joined; missing rank 2" + lost_two);
}

TEST(Rendezvous, AFewOfManyThatWereLostAreNamed) {
  Rendezvous rendezvous(9, 0);
  for (std::int32_t rank = 0; rank < 8; ++rank) {
    ASSERT_FALSE(rendezvous.add(static_cast<Peer>(rank + 1), wish(rank, kNoRank, 9, 0)));
    (void)rendezvous.lose(static_cast<Peer>(rank + 1), "connection closed");
  }
  const std::string missing = rendezvous.missing();
  EXPECT_NE(missing.find("worker 3 ("), std::string::npos) << missing;
  EXPECT_EQ(missing.find("worker 4 ("), std::string::npos) << missing;
  EXPECT_TRUE(missing.ends_with("; 4 more were lost as well")) << missing;
}

TEST(Rendezvous, TermsThatDifferAreRefused) {
  const Terms terms{.min_workers = 1, .placement = "auto", .key_hash = "raw"};
  Rendezvous rendezvous(3, 2, {.min_workers = 1});
  const auto refused = [&](Join join, const Terms& with) {
    join.node.terms = with;
    const auto why = rendezvous.add(10, join);
    return why ? why->text : "";
  };
  EXPECT_EQ(refused(wish(0, kNoRank, 3, 2), {.placement = "auto"}),
            "BPS_MIN_WORKERS is 0 here, and 1 on the scheduler");
  EXPECT_EQ(refused(wish(kNoRank, 0, 3, 2), {.min_workers = 1}), "");
  EXPECT_EQ(refused(wish(0, kNoRank, 3, 2), terms), "") << "a server has no placement";
  EXPECT_EQ(refused(wish(kNoRank, 1, 3, 2), {.min_workers = 2}), "BPS_MIN_WORKERS is 2 here, and 1 on the scheduler");
  Terms other = terms;
  other.placement = "mixed";
  EXPECT_EQ(refused(wish(1, kNoRank, 3, 2), other), "BPS_PLACEMENT is mixed here, and auto on worker 0 (a, pid 42)");
  other = terms;
  other.device_route = true;
  EXPECT_EQ(refused(wish(1, kNoRank, 3, 2), other), "BPS_DEVICE_ROUTE is 1 here, and 0 on worker 0 (a, pid 42)");
  other = terms;
  other.gpu_host_sum = true;
  EXPECT_EQ(refused(wish(1, kNoRank, 3, 2), other), "BPS_GPU_HOST_SUM is 1 here, and 0 on worker 0 (a, pid 42)");
  other = terms;
  other.survives_servers = true;
  EXPECT_EQ(refused(wish(1, kNoRank, 3, 2), other), "BPS_SERVER_FAILOVER is 1 here, and 0 on worker 0 (a, pid 42)");
  EXPECT_EQ(refused(wish(1, kNoRank, 3, 2), terms), "");
}

TEST(Rendezvous, FreeRanksGoByArrival) {
  Rendezvous rendezvous(3, 0);
  EXPECT_FALSE(rendezvous.add(10, wish(kAnyRank, kNoRank, 3, 0)));
  EXPECT_FALSE(rendezvous.add(11, wish(0, kNoRank, 3, 0)));
  EXPECT_FALSE(rendezvous.add(12, wish(kAnyRank, kNoRank, 3, 0)));
  EXPECT_EQ(rendezvous.seat().peers, (std::vector<Peer>{11, 10, 12}));
}

TEST(Rendezvous, JointProcessesGetEqualRanks) {
  Rendezvous rendezvous(3, 3);
  for (const std::int32_t rank : {2, 0, 1}) {
    EXPECT_FALSE(rendezvous.add(static_cast<Peer>(rank), wish(rank, kAnyRank, 3, 3)));
  }
  const auto members = rendezvous.seat().membership;
  ASSERT_TRUE(members.is_consistent());
  for (const Node& node : members.nodes) EXPECT_EQ(node.worker_rank, node.server_rank);
}

TEST(Rendezvous, SpareServersComeBeforeJointOnes) {
  Rendezvous rendezvous(2, 3);
  EXPECT_FALSE(rendezvous.add(1, wish(kAnyRank, kAnyRank, 2, 3)));
  EXPECT_FALSE(rendezvous.add(2, wish(kAnyRank, kAnyRank, 2, 3)));
  EXPECT_FALSE(rendezvous.add(3, wish(kNoRank, kAnyRank, 2, 3)));
  const auto [members, peers] = rendezvous.seat();
  EXPECT_TRUE(members.is_consistent());
  EXPECT_EQ(peers, (std::vector<Peer>{1, 2, 3}));
  EXPECT_EQ(members.nodes[0].server_rank, 1);
  EXPECT_EQ(members.nodes[1].server_rank, 2);
  EXPECT_EQ(members.nodes[2].server_rank, 0);
}

TEST(Rendezvous, RefusesWhatDoesNotFit) {
  Rendezvous rendezvous(2, 1);
  EXPECT_FALSE(rendezvous.add(1, wish(1, kNoRank, 2, 1)));
  const auto taken = rendezvous.add(2, wish(1, kNoRank, 2, 1));
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->code, ErrorCode::kMismatch);
  EXPECT_EQ(taken->text, "worker rank 1 is taken by the process with pid 42 on a");
  EXPECT_EQ(rendezvous.add(3, wish(2, kNoRank, 2, 1))->text,
            "worker rank 2 is out of range: the job has 2 workers and 1 server");
  EXPECT_EQ(rendezvous.add(4, wish(0, kNoRank, 4, 1))->text,
            "this process expects 4 workers and 1 server, the scheduler expects 2 workers and 1 server");
  EXPECT_EQ(rendezvous.add(5, wish(kNoRank, kNoRank, 2, 1))->code, ErrorCode::kInvalidArgument);
  EXPECT_FALSE(rendezvous.add(6, wish(kAnyRank, kNoRank, 2, 1)));
  EXPECT_EQ(rendezvous.add(7, wish(kAnyRank, kNoRank, 2, 1))->text, "all 2 workers and 1 server have joined already");
}

TEST(Rendezvous, SaysWhoIsMissing) {
  Rendezvous rendezvous(4, 1);
  EXPECT_FALSE(rendezvous.add(1, wish(0, kNoRank, 4, 1)));
  EXPECT_FALSE(rendezvous.add(2, wish(2, kNoRank, 4, 1)));
  EXPECT_EQ(rendezvous.missing(),
            "2 of 4 workers joined; missing ranks 1, 3; 0 of 1 server joined; missing server rank 0");
  EXPECT_FALSE(rendezvous.add(3, wish(kNoRank, 0, 4, 1)));
  EXPECT_EQ(rendezvous.missing(), "2 of 4 workers joined; missing ranks 1, 3");
  EXPECT_FALSE(rendezvous.add(4, wish(kAnyRank, kNoRank, 4, 1)));
  EXPECT_EQ(rendezvous.missing(), "3 of 4 workers joined");
}

}  // namespace
}  // namespace bps::van
