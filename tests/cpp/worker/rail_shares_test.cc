// SPDX-License-Identifier: Apache-2.0
#include "worker/rail_shares.h"

#include <gtest/gtest.h>

#include <random>

namespace bps::worker {
namespace {

// Bytes that each connection has taken of batches of up to `most` bytes.
std::vector<double> spread(RailShares& shares, std::size_t connections, std::uint64_t most, int batches = 10'000) {
  std::mt19937_64 random(3);
  std::vector<double> taken(connections);
  for (int i = 0; i < batches; ++i) {
    const std::uint64_t bytes = random() % most;
    const std::size_t next = shares.next();
    shares.charge(next, bytes);
    taken[next] += static_cast<double>(bytes);
  }
  return taken;
}

double share_of_first_of_two(RailShares& shares) {
  const auto taken = spread(shares, 2, 4096);
  return taken[0] / (taken[0] + taken[1]);
}

TEST(RailShares, OneConnectionTakesAll) {
  RailShares shares(std::vector<std::uint32_t>{100'000});
  EXPECT_GT(spread(shares, 1, 1 << 20)[0], 0);
}

TEST(RailShares, EqualRailsTakeTheSame) {
  RailShares shares(std::vector<std::uint32_t>{10'000, 10'000});
  const auto taken = spread(shares, 2, 1 << 20);
  EXPECT_NEAR(taken[0] / taken[1], 1, 0.01);
}

TEST(RailShares, UnequalRailsTakeInProportion) {
  RailShares shares(std::vector<std::uint32_t>{25'000, 100'000, 10'000});
  const auto taken = spread(shares, 3, 1 << 20);
  EXPECT_NEAR(taken[1] / taken[0], 4, 0.05);
  EXPECT_NEAR(taken[0] / taken[2], 2.5, 0.05);
}

TEST(RailShares, AnUnknownSpeedMakesAllEqual) {
  RailShares shares(std::vector<std::uint32_t>{25'000, 0, 100'000});
  const auto taken = spread(shares, 3, 1 << 20);
  EXPECT_NEAR(taken[0] / taken[1], 1, 0.01);
  EXPECT_NEAR(taken[2] / taken[1], 1, 0.01);
}

TEST(RailShares, BatchesWithoutPayloadTakeTurns) {
  RailShares shares(std::vector<std::uint32_t>{1000, 1000, 1000});
  std::vector<int> turns(3);
  for (int i = 0; i < 30; ++i) {
    const std::size_t next = shares.next();
    shares.charge(next, 0);
    ++turns[next];
  }
  EXPECT_EQ(turns, (std::vector<int>{10, 10, 10}));
}

// A year at 400 Gbit/s, in batches that are larger than any real one.
TEST(RailShares, ClocksNeverOverflow) {
  RailShares shares(std::vector<std::uint32_t>{400'000, 1000});
  const auto taken = spread(shares, 2, std::uint64_t{1} << 50, 3'000);
  EXPECT_NEAR(taken[0] / taken[1], 400, 40);
}

TEST(RailShares, WhatIsCarriedCountsWhereItIsNotWhatWasPromised) {
  RailShares shares(std::vector<std::uint32_t>{10'000, 10'000});
  shares.note(0, {.bytes_per_s = 10'000'000});
  shares.follow();  // nothing is known of the other one
  EXPECT_NEAR(share_of_first_of_two(shares), 0.5, 0.01);
  shares.note(1, {.bytes_per_s = 5'000, .at_least = true});  // a small write
  shares.follow();
  EXPECT_NEAR(share_of_first_of_two(shares), 0.5, 0.01);
  shares.note(1, {.bytes_per_s = 30'000'000});
  shares.follow();
  EXPECT_NEAR(share_of_first_of_two(shares), 0.25, 0.01);
  for (int i = 0; i < 40; ++i) shares.note(0, {.bytes_per_s = 29'000'000, .at_least = true});
  shares.follow();  // nearly what was promised
  EXPECT_NEAR(share_of_first_of_two(shares), 0.5, 0.01);
}

TEST(RailShares, ARailThatHardlyCarriesAnythingIsStillTried) {
  RailShares shares(std::vector<std::uint32_t>{10'000, 10'000});
  shares.note(0, {.bytes_per_s = 1'000'000'000});
  shares.note(1, {.bytes_per_s = 1});
  shares.follow();
  const double share = 1 - share_of_first_of_two(shares);
  EXPECT_GT(share, 0.01);
  EXPECT_LT(share, 0.02);
}

}  // namespace
}  // namespace bps::worker
