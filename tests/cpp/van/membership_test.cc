// SPDX-License-Identifier: Apache-2.0
#include "van/membership.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tensor/key_map.h"

namespace bps::van {
namespace {

Node node(std::uint32_t id, std::int32_t worker, std::int32_t server) {
  return {.id = id,
          .worker_rank = worker,
          .server_rank = server,
          .worker_loops = 1,
          .server_loops = 1,
          .pid = 42,
          .host = "a",
          .host_key = "",
          .addresses = {}};
}

TEST(Membership, DescribesNodesForPeople) {
  EXPECT_EQ(node(1, 1, 1).describe(), "worker 1 and server 1 (a, pid 42)");
  EXPECT_EQ(node(1, 3, kNoRank).describe(), "worker 3 (a, pid 42)");
  EXPECT_EQ(node(1, kNoRank, 0).describe(), "server 0 (a, pid 42)");
}

TEST(Membership, FindsByRankAndId) {
  const Membership members{{node(1, 0, 1), node(2, 1, kNoRank), node(3, kNoRank, 0)}, 2, 2};
  EXPECT_TRUE(members.is_consistent());
  EXPECT_EQ(members.worker(1), &members.nodes[1]);
  EXPECT_EQ(members.worker(2), nullptr);
  EXPECT_EQ(members.server(0), &members.nodes[2]);
  EXPECT_EQ(members.server(1), &members.nodes[0]);
  EXPECT_EQ(members.server(2), nullptr);
  EXPECT_EQ(members.server(0xffffffff), nullptr) << "-1 is no rank";
  EXPECT_EQ(members.by_id(3), &members.nodes[2]);
  EXPECT_EQ(members.by_id(0), nullptr);
  EXPECT_EQ(members.by_id(4), nullptr);
}

// Servers by rank, with these identities.
Membership servers(const std::vector<std::uint64_t>& identities) {
  Membership members{{}, 0, static_cast<std::uint32_t>(identities.size())};
  for (const std::uint64_t identity : identities) {
    const auto rank = static_cast<std::int32_t>(members.nodes.size());
    members.nodes.push_back(node(static_cast<std::uint32_t>(rank) + 1, kNoRank, rank));
    members.nodes.back().identity = identity;
  }
  return members;
}

using Identities = std::vector<std::uint64_t>;

TEST(Membership, ServersKeepTheirSlots) {
  constexpr std::uint32_t kNone = tensor::kNoServer;
  Membership members = servers({10, 11, 12});
  EXPECT_EQ(members.server_of_slot(), (std::vector<std::uint32_t>{0, 1, 2})) << "as if there were none";
  members.take_slots({});
  EXPECT_EQ(members.slots, (Identities{10, 11, 12}));
  Membership next = servers({10, 12});
  next.take_slots(members.slots);
  EXPECT_EQ(next.slots, (Identities{10, 11, 12}));
  EXPECT_EQ(next.server_of_slot(), (std::vector<std::uint32_t>{0, kNone, 1}));
  EXPECT_TRUE(next.is_consistent());
  EXPECT_EQ(next.all_server_loops(), 3U) << "tensors are cut as before";
  Membership third = servers({10, 12, 13});
  third.take_slots(next.slots);
  EXPECT_EQ(third.slots, (Identities{10, 13, 12})) << "who enters takes what is free";
  Membership fourth = servers({10, 12, 13, 14});
  fourth.take_slots(third.slots);
  EXPECT_EQ(fourth.slots, (Identities{10, 13, 12, 14}));
}

TEST(Membership, EveryServerHasASlot) {
  Membership members = servers({10, 11});
  for (const Identities& wrong : {Identities{10}, Identities{10, 12}}) {
    members.slots = wrong;
    EXPECT_FALSE(members.is_consistent());
  }
  members.slots = {12, 11, 10};
  EXPECT_TRUE(members.is_consistent());
}

TEST(Membership, EveryRoleHasALoop) {
  Membership members{{node(1, 0, 1), node(2, 1, kNoRank), node(3, kNoRank, 0)}, 2, 2};
  members.nodes[1].server_loops = members.nodes[2].worker_loops = 0;
  EXPECT_TRUE(members.is_consistent()) << "what a node does not do it needs no loop for";
  members.nodes[0].server_loops = 0;
  EXPECT_FALSE(members.is_consistent());
  members.nodes[0].server_loops = 1;
  members.nodes[1].worker_loops = 0;
  EXPECT_FALSE(members.is_consistent());
}

TEST(Membership, GroupsKnowPositions) {
  const Group group{1, {2, 5, 7}};
  EXPECT_EQ(group.size(), 3U);
  EXPECT_EQ(group.index_of(5), 1);
  EXPECT_EQ(group.index_of(3), kNoRank);
  EXPECT_EQ(group.index_of(8), kNoRank);
}

TEST(Membership, NamesRanks) {
  EXPECT_EQ(name_ranks(std::vector<std::uint32_t>{3}), "rank 3");
  EXPECT_EQ(name_ranks(std::vector<std::uint32_t>{0, 1, 3}), "ranks 0, 1, 3");
  std::vector<std::uint32_t> many(100);
  std::iota(many.begin(), many.end(), 0);
  EXPECT_EQ(name_ranks(many), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 84 more");
}

}  // namespace
}  // namespace bps::van
