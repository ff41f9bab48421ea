// SPDX-License-Identifier: Apache-2.0
// Who shares a host, and who speaks for it: every process must compute the same.
#include "van/hosts.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>

namespace bps::van {
namespace {

// One letter per worker rank and host; dedicated servers are on hosts of their own, or every worker is a server.
Membership members(const std::string& layout, std::uint32_t dedicated) {
  Membership all;
  all.workers = static_cast<std::uint32_t>(layout.size());
  all.servers = dedicated == 0 ? all.workers : dedicated;
  for (std::uint32_t i = 0; i < all.workers + dedicated; ++i) {
    Node node;
    node.id = i + 1;
    const bool is_worker = i < all.workers;
    node.worker_rank = is_worker ? static_cast<std::int32_t>(i) : kNoRank;
    node.server_rank =
        is_worker ? (dedicated == 0 ? node.worker_rank : kNoRank) : static_cast<std::int32_t>(i - all.workers);
    node.worker_loops = node.server_loops = 1;
    node.host_key = is_worker ? std::string(1, layout[i]) : "server " + std::to_string(i);
    node.sums_on_host = is_worker;
    all.nodes.push_back(node);
  }
  return all;
}

Group world(const std::string& layout) {
  Group all{0, std::vector<std::uint32_t>(layout.size())};
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  return all;
}

TEST(Hosts, AreActiveOnlyWhereSomethingIsShared) {
  EXPECT_TRUE(Hosts(members("aabb", 0)).active());
  EXPECT_TRUE(Hosts(members("abbb", 2)).active());
  EXPECT_FALSE(Hosts(members("aaaa", 0)).active()) << "one host";
  EXPECT_FALSE(Hosts(members("abcd", 0)).active()) << "one rank on each";
  Membership unwilling = members("aabb", 0);
  unwilling.nodes[3].sums_on_host = false;
  EXPECT_FALSE(Hosts(unwilling).active());
}

TEST(Hosts, AreNumberedByTheirLowestRank) {
  const Hosts hosts(members("bab", 1));
  EXPECT_EQ(hosts.count(), 2U);
  EXPECT_EQ(hosts.host_of(0), 0U);
  EXPECT_EQ(hosts.host_of(1), 1U);
  EXPECT_EQ(hosts.ranks(0), (std::vector<std::uint32_t>{0, 2}));
  EXPECT_EQ(hosts.local_index(2), 1U);
  EXPECT_EQ(hosts.host_of_server(0), Hosts::kNoHost);
}

TEST(Hosts, AServerThatIsAWorkerIsTheRelayOfItsHost) {
  const Hosts hosts(members("abab", 0));
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(hosts.relay(hosts.host_of(rank), rank, 17), rank);
    EXPECT_TRUE(hosts.relays(rank, rank));
  }
}

TEST(Hosts, RelaysAreOnTheHostAndEveryRankIsOne) {
  for (const std::string layout : {"aabb", "aaab", "aaaabbbb", "abcabc", "aaabb"}) {
    for (const std::uint32_t dedicated : {0U, 1U, 2U, 3U, 16U}) {
      const Hosts hosts(members(layout, dedicated));
      const std::uint32_t servers = dedicated == 0 ? static_cast<std::uint32_t>(layout.size()) : dedicated;
      for (std::uint32_t host = 0; host < hosts.count(); ++host) {
        std::set<std::uint32_t> used;
        for (std::uint32_t server = 0; server < servers; ++server) {
          for (std::uint64_t hash = 0; hash < 64; ++hash) {
            const std::uint32_t relay = hosts.relay(host, server, hash);
            EXPECT_EQ(hosts.host_of(relay), host);
            EXPECT_TRUE(hosts.relays(relay, server));
            used.insert(relay);
          }
          for (const std::uint32_t rank : hosts.ranks(host)) {
            if (used.contains(rank)) continue;
            for (std::uint32_t before = 0; before <= server; ++before) EXPECT_FALSE(hosts.relays(rank, before));
          }
        }
        EXPECT_EQ(used.size(), hosts.ranks(host).size()) << layout << " " << dedicated;
      }
    }
  }
}

TEST(Contributors, AHostContributesOnceInTheOrderOfLowestRanks) {
  const Hosts hosts(members("babac", 0));
  const Contributors all = Contributors::by_host(world("babac"), hosts);
  ASSERT_EQ(all.size(), 3U);
  EXPECT_EQ(all[0].positions, (std::vector<std::uint32_t>{0, 2}));
  EXPECT_EQ(all[1].positions, (std::vector<std::uint32_t>{1, 3}));
  EXPECT_EQ(all[2].positions, (std::vector<std::uint32_t>{4}));
  EXPECT_TRUE(all[0].is_host());
  EXPECT_FALSE(all[2].is_host());
  EXPECT_EQ(all.of_position(3), 1U);
  EXPECT_EQ(all.of_position(5), Contributors::kNone);
  EXPECT_TRUE(all.has_hosts());
}

TEST(Contributors, PlacesAreThoseInTheGroup) {
  const Hosts hosts(members("aabb", 0));
  const Group group{7, {1, 2, 3}};
  const Contributors network = Contributors::by_host(group, hosts);
  ASSERT_EQ(network.size(), 2U);
  EXPECT_EQ(network[1].positions, (std::vector<std::uint32_t>{1, 2}));
  const Contributors here = Contributors::on_host(group, hosts, 1);
  ASSERT_EQ(here.size(), 2U);
  EXPECT_EQ(here[0].positions, (std::vector<std::uint32_t>{1}));
  EXPECT_EQ(here.of_position(0), Contributors::kNone) << "rank 1 is on the other host";
  EXPECT_EQ(Contributors::on_host({8, {2, 3}}, hosts, 0).size(), 0U);
}

TEST(Contributors, AreTheMembersWhereNothingIsShared) {
  const Hosts hosts(members("aabb", 0));
  EXPECT_EQ(Contributors::by_host({7, {0, 1}}, hosts).size(), 2U) << "one host";
  EXPECT_FALSE(Contributors::by_host({7, {0, 1}}, hosts).has_hosts());
  EXPECT_EQ(Contributors::by_host({7, {0, 2}}, hosts).size(), 2U) << "one rank on each";
  EXPECT_EQ(Contributors::by_host(world("aabb"), Hosts(members("aaaa", 0))).size(), 4U);
}

}  // namespace
}  // namespace bps::van
