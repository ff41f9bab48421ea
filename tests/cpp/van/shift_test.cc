// SPDX-License-Identifier: Apache-2.0
#include "van/shift.h"

#include <gtest/gtest.h>

#include "van/members.h"

namespace bps::van {
namespace {

constexpr auto kLong = std::chrono::seconds(10);

// Three workers, node i + 1 with the connection i + 101, and a server.
struct Members {
  Members()
      : table(seating()), shift(table, [this](std::span<const Peer> peers, const Message& message) {
          for (const Peer peer : peers) told[peer].push_back(message);
        }) {}

  static Rendezvous::Seating seating() {
    Membership members = members_with_one_loop(3);
    Node server;
    server.id = 4;
    server.server_rank = 0;
    server.server_loops = 1;
    members.nodes.push_back(server);
    members.servers = 1;
    return {std::move(members), {101, 102, 103, 104}};
  }
  const Group* group(std::uint32_t id) const { return id == 0 ? &all : id == 1 ? &two : nullptr; }
  bool take(std::uint32_t rank, std::vector<TensorRound> next, std::uint32_t number) {
    return shift.take(table.worker(rank), Rounds{number, std::move(next)},
                      [this](std::uint32_t id) { return group(id); });
  }
  // The same shift as the workers see it.
  EndShift last() const {
    const EndShift first = std::get<EndShift>(told.at(101).back());
    for (const Peer peer : {102, 103}) EXPECT_EQ(std::get<EndShift>(told.at(peer).back()), first);
    EXPECT_FALSE(told.contains(104)) << "servers need not know";
    return first;
  }

  const Group all{0, {0, 1, 2}};
  const Group two{1, {0, 2}};
  MemberTable table;
  std::map<Peer, std::vector<Message>> told;
  Shift shift;
  const Clock::time_point now = Clock::now();
  const std::vector<std::uint64_t> links{8, 8, 2, 8};
};

TEST(Shift, BeginsForAllWithTheLatestRoundOfAny) {
  Members three;
  three.shift.begin(three.links, three.now);
  EXPECT_EQ(std::get<BeginShift>(three.told[102].back()).number, 1U);
  EXPECT_TRUE(three.take(0, {{0, 7, 4}, {0, 9, 2}, {1, 3, 8}}, 1));
  EXPECT_TRUE(three.take(2, {{0, 7, 5}, {1, 3, 7}}, 1));
  EXPECT_TRUE(three.shift.is_open());
  EXPECT_TRUE(three.take(1, {{0, 7, 4}}, 1));
  EXPECT_FALSE(three.shift.is_open());
  EXPECT_EQ(three.last(), (EndShift{1, three.links, {{0, 7, 5}, {0, 9, 2}, {1, 3, 8}}}));
  EXPECT_EQ(three.shift.done(), 1U);
  EXPECT_EQ(three.shift.links(), three.links);
}

TEST(Shift, IsCalledOffForAllWhereAWorkerDoesNotAnswerOrLeaves) {
  Members three;
  three.shift.begin(three.links, three.now);
  EXPECT_TRUE(three.take(0, {{0, 7, 4}}, 1));
  three.shift.look(three.now);
  EXPECT_TRUE(three.shift.is_open());
  three.shift.look(three.now + kLong);
  EXPECT_EQ(three.last(), (EndShift{1, {}, {}}));
  EXPECT_TRUE(three.take(1, {{0, 7, 4}}, 1)) << "it was slow, and is ignored";
  EXPECT_EQ(three.shift.done(), 0U);

  three.shift.begin(three.links, three.now);
  three.shift.call_off();
  EXPECT_EQ(three.last(), (EndShift{2, {}, {}}));
  const std::size_t told = three.told[101].size();
  three.shift.call_off();
  EXPECT_EQ(three.told[101].size(), told) << "there is nothing to call off";
  three.table.worker(1).fate = Member::Fate::kLeft;
  three.shift.begin(three.links, three.now);
  EXPECT_EQ(three.told[101].size(), told) << "it would wait for a worker that is gone";
}

// A worker knows two placements. So the next shift waits until all ranks of a group have begun the first round of the
// last one.
TEST(Shift, AnotherOneWaitsUntilAllAreThroughTheLastOne) {
  Members three;
  const auto shift = [&](std::uint32_t number, std::vector<TensorRound> a, std::vector<TensorRound> b,
                         std::vector<TensorRound> c) {
    three.shift.begin(three.links, three.now);
    EXPECT_TRUE(three.take(0, std::move(a), number) && three.take(1, std::move(b), number) &&
                three.take(2, std::move(c), number));
    return !three.last().links.empty();
  };
  EXPECT_TRUE(shift(1, {{0, 7, 5}}, {{0, 7, 4}}, {{0, 7, 4}}));
  EXPECT_FALSE(shift(2, {{0, 7, 5}}, {{0, 7, 4}}, {{0, 7, 6}})) << "rank 1 has not begun round 4";
  EXPECT_FALSE(shift(3, {{0, 7, 5}}, {}, {{0, 7, 6}})) << "nor has it declared the tensor here";
  EXPECT_TRUE(shift(4, {{0, 7, 5}}, {{0, 7, 5}}, {{0, 7, 6}, {1, 2, 3}}));
  EXPECT_EQ(three.last().from, (std::vector<TensorRound>{{0, 7, 6}, {1, 2, 3}}));
  EXPECT_FALSE(shift(5, {{0, 7, 6}, {1, 2, 2}}, {{0, 7, 6}}, {{0, 7, 6}, {1, 2, 3}}));
  EXPECT_TRUE(shift(6, {{0, 7, 6}, {1, 2, 3}}, {{0, 7, 6}}, {{0, 7, 6}, {1, 2, 3}})) << "rank 1 is not in that group";
}

TEST(Shift, TakesNothingThatNoWorkerSays) {
  Members three;
  EXPECT_FALSE(three.take(0, {}, 1)) << "none was begun";
  three.shift.begin(three.links, three.now);
  EXPECT_FALSE(three.take(1, {{1, 7, 4}}, 1)) << "a group of others";
  EXPECT_FALSE(three.take(1, {{5, 7, 4}}, 1)) << "a group that does not exist";
  EXPECT_TRUE(three.take(0, {{0, 7, 4}}, 1));
  EXPECT_FALSE(three.take(0, {{0, 7, 9}}, 1)) << "it has answered";
}

}  // namespace
}  // namespace bps::van
