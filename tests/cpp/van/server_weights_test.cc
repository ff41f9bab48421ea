// SPDX-License-Identifier: Apache-2.0
#include "van/server_weights.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace bps::van {
namespace {

constexpr std::uint64_t kLink = 1'000'000'000;

// A rank with a server on each host, then spare hosts. Nobody knows what their servers add.
Membership hosts_of_one_rank(std::uint32_t workers, std::uint32_t spares) {
  Membership members{.nodes = {}, .workers = workers, .servers = workers + spares};
  for (std::uint32_t i = 0; i < workers + spares; ++i) {
    Node& node = members.nodes.emplace_back();
    node.id = i + 1;
    node.worker_rank = i < workers ? static_cast<std::int32_t>(i) : kNoRank;
    node.server_rank = static_cast<std::int32_t>(i);
    node.worker_loops = node.server_loops = 1;
    node.host = node.host_key = "host-" + std::to_string(i);
    node.link = kLink;
    node.terms.placement = "auto";
  }
  return members;
}

std::vector<ServerWeights::Part> parts_of(const Membership& members) {
  return ServerWeights::of_job(members, Hosts(members))->parts_of(members.all());
}

std::vector<std::uint32_t> weights_of(const Membership& members) {
  return ServerWeights::of_job(members, Hosts(members))->of(members.all());
}

TEST(ServerWeights, AServerThatAddsLessThanItsLinkCarriesGetsLess) {
  Membership members = hosts_of_one_rank(4, 0);
  for (Node& node : members.nodes) node.sum_rate = 8 * kLink;
  members.nodes.back().sum_rate = kLink / 4;
  const auto parts = parts_of(members);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(parts[i].share, 0.3, 1e-6);
    EXPECT_NEAR(parts[i].busy.link * kLink, 1.6, 1e-6);
    EXPECT_EQ(parts[i].busy.sums, 0);
  }
  EXPECT_NEAR(parts[3].share, 0.1, 1e-6);
  EXPECT_NEAR(parts[3].busy.link * kLink, 1.2, 1e-6);
  EXPECT_NEAR(parts[3].busy.sums * kLink, 1.6, 1e-6);
}

TEST(ServerWeights, ServersThatAreFasterThanTheirLinksMayDiffer) {
  for (const std::uint32_t workers : {2U, 4U}) {
    for (const std::uint32_t spares : {0U, 1U, 4U}) {
      Membership members = hosts_of_one_rank(workers, spares);
      members.nodes[1].link = 4 * kLink;
      const auto before = weights_of(members);
      for (Node& node : members.nodes) node.sum_rate = node.link + node.id * kLink / 100;
      EXPECT_EQ(weights_of(members), before);
    }
  }
}

TEST(ServerWeights, TheServersOfAHostAddTogether) {
  Membership members = hosts_of_one_rank(4, 0);
  const auto before = weights_of(members);
  for (Node& node : members.nodes) {
    node.host_key = node.id <= 2 ? "a" : "b";
    node.sum_rate = kLink * 6 / 10;
  }
  EXPECT_EQ(weights_of(members), before);
  members.nodes[0].sum_rate = kLink / 10;
  EXPECT_LT(weights_of(members)[0], before[0]);
  members.nodes[1].sum_rate = 0;  // unknown: perhaps a fast one
  EXPECT_EQ(weights_of(members), before);
}

TEST(ServerWeights, AGroupOnOneHostIsSummedInsideItsRanks) {
  Membership members = hosts_of_one_rank(6, 1);
  for (Node& node : members.nodes) node.host_key = node.id <= 3 ? "a" : node.id <= 6 ? "b" : "spare";
  const auto weights = ServerWeights::of_job(members, Hosts(members));
  const auto of = [&](std::vector<std::uint32_t> ranks) {
    return weights->of(Group{.id = 1, .ranks = std::move(ranks)});
  };
  constexpr std::uint32_t kHalf = ServerWeights::kAll / 2;
  EXPECT_EQ(of({0, 2}), (std::vector<std::uint32_t>{kHalf, 0, kHalf, 0, 0, 0, 0}));
  EXPECT_EQ(of({4}), (std::vector<std::uint32_t>{0, 0, 0, 0, ServerWeights::kAll, 0, 0}));
  const auto across = of({1, 5});
  EXPECT_EQ(across[0], across[1]) << "what a host sums is shared by all of its servers";
  EXPECT_GT(across[6], 0U) << "a spare host sums for every group that leaves its host";
}

TEST(ServerWeights, AGroupOnAHostWithAServerOfItsOwnIsSummedThere) {
  Membership members = hosts_of_one_rank(3, 1);
  for (Node& node : members.nodes) node.host_key = "a";
  const auto weights = ServerWeights::of_job(members, Hosts(members));
  EXPECT_EQ(weights->of(Group{.id = 1, .ranks = {0, 2}}), (std::vector<std::uint32_t>{0, 0, 0, ServerWeights::kAll}));
}

TEST(ServerWeights, WithoutTheSpeedOfAnyLinkThereIsNoLimit) {
  Membership members = hosts_of_one_rank(3, 1);
  for (Node& node : members.nodes) node.link = 0;
  const auto before = weights_of(members);
  members.nodes[0].sum_rate = 1;
  EXPECT_EQ(weights_of(members), before);
  EXPECT_FALSE(ServerWeights::of_job(members, Hosts(members))->knows_links());
}

TEST(ServerWeights, MixedTakesEverybodyToBeAlike) {
  Membership members = hosts_of_one_rank(3, 1);
  const auto before = weights_of(members);
  members.nodes.front().terms.placement = "mixed";
  members.nodes[3].sum_rate = kLink / 8;
  members.nodes[1].link = kLink / 8;
  EXPECT_EQ(weights_of(members), before);
}

}  // namespace
}  // namespace bps::van
