// SPDX-License-Identifier: Apache-2.0
// In which order the partitions of a tensor go out, and to whom. Every rank must compute the same order.
#include "worker/places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

namespace bps::worker {
namespace {

constexpr std::uint64_t kPieceBytes = 64 << 10;

// One letter per rank and host; every rank is a server.
van::Membership members(const std::string& layout) {
  van::Membership all;
  all.workers = all.servers = static_cast<std::uint32_t>(layout.size());
  for (std::uint32_t i = 0; i < all.workers; ++i) {
    van::Node node;
    node.id = i + 1;
    node.worker_rank = node.server_rank = static_cast<std::int32_t>(i);
    node.worker_loops = node.server_loops = 1;
    node.host_key = std::string(1, layout[i]);
    node.sums_on_host = true;
    all.nodes.push_back(node);
  }
  return all;
}

struct Sent {
  std::uint32_t turn, partition, server;
};

// The parts that a rank sends, in their turns, and the server that each ends at.
std::vector<Sent> parts_of(const std::string& layout, std::uint32_t rank, bool sharded) {
  const van::Membership all = members(layout);
  std::vector<std::uint32_t> own(all.workers);
  std::iota(own.begin(), own.end(), 0U);
  tensor::KeyMapConfig key_map;
  key_map.servers = all.servers;
  const Places places(key_map, van::ServerPlaces(all), std::nullopt, own, van::Hosts(all), rank);
  const tensor::Partitioning cut(12 * kPieceBytes, 4, kPieceBytes, sharded ? all.workers : 1);
  Tensor tensor(cut, cut);
  tensor.group = std::make_shared<const van::Group>(van::Group{0, own});
  const Plan plan = places.plan(tensor, cut, sharded, {}, 1);
  std::vector<Sent> sent;
  for (std::uint32_t place = 0; place < plan.size(); ++place) {
    EXPECT_TRUE(std::ranges::is_sorted(plan[place], {}, &Part::turn))
        << "or the first one would hold up an earlier one";
    for (const Part& part : plan[place])
      sent.push_back({part.turn, part.partition, part.for_host() ? part.place : place});
  }
  std::ranges::sort(sent, {}, &Sent::turn);
  return sent;
}

TEST(Places, EachPartitionHasATurnAndEveryRankTheSame) {
  for (const bool sharded : {false, true}) {
    for (const char* layout : {"abcd", "aabb", "aaab"}) {
      const std::vector<Sent> first = parts_of(layout, 0, sharded);
      ASSERT_EQ(first.size(), 12U);
      for (std::uint32_t rank = 0; rank < 4; ++rank) {
        const std::vector<Sent> same = parts_of(layout, rank, sharded);
        for (std::uint32_t turn = 0; turn < 12; ++turn) {
          EXPECT_EQ(same[turn].turn, turn) << layout << " " << rank;
          EXPECT_EQ(same[turn].partition, first[turn].partition) << layout << " " << rank;
          EXPECT_EQ(same[turn].server, first[turn].server) << layout << " " << rank;
        }
      }
    }
  }
}

TEST(Places, EveryFewTurnsEachServerHasAPartition) {
  for (const bool sharded : {false, true}) {
    for (const char* layout : {"abcd", "aabb"}) {
      const std::vector<Sent> sent = parts_of(layout, 1, sharded);
      for (std::size_t begin = 0; begin < sent.size(); begin += 4) {
        std::vector<std::uint32_t> servers;
        for (std::size_t i = begin; i < begin + 4; ++i) servers.push_back(sent[i].server);
        std::ranges::sort(servers);
        EXPECT_EQ(servers, (std::vector<std::uint32_t>{0, 1, 2, 3})) << layout << (sharded ? ", sharded" : "");
      }
    }
  }
}

// By loop of this rank: at which places a tensor's partitions are.
std::vector<std::set<std::size_t>> places_by_loop(std::uint32_t id, std::uint64_t bytes, std::size_t loops) {
  van::Membership all = members("ab");
  for (van::Node& node : all.nodes) node.server_loops = 2;
  tensor::KeyMapConfig key_map;
  key_map.servers = all.servers;
  const Places places(key_map, van::ServerPlaces(all), std::nullopt, {0, 1}, van::Hosts(all), 0);
  const tensor::Partitioning cut(bytes, 4, kPieceBytes / 4);
  Tensor tensor(cut, cut);
  tensor.id = id;
  tensor.bytes = bytes;
  tensor.group = std::make_shared<const van::Group>(van::Group{0, {0, 1}});
  const Plan plan = places.plan(tensor, cut, false, {}, loops);
  std::vector<std::set<std::size_t>> found(loops);
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (!plan[i].empty()) found[i / places.count()].insert(i % places.count());
  }
  return found;
}

TEST(Places, SmallTensorsBelongToTheFirstOfTwoLoops) {
  for (std::uint32_t id = 1; id <= 8; ++id) {
    for (const std::uint64_t bytes : {std::uint64_t{4}, kPieceBytes}) {
      const auto found = places_by_loop(id, bytes, 2);
      EXPECT_TRUE(found[1].empty()) << id;
      EXPECT_EQ(found[0], places_by_loop(id, bytes, 1)[0]) << "a rank with one loop sends it to others";
      for (const std::size_t place : found[0]) EXPECT_EQ(place % 2, 0U) << id;
    }
    const auto large = places_by_loop(id, 2 * kPieceBytes, 2);
    EXPECT_TRUE(!large[0].empty() && !large[1].empty()) << id;
  }
}

}  // namespace
}  // namespace bps::worker
