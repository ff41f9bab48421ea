// SPDX-License-Identifier: Apache-2.0
#include "tensor/key_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/error.h"

namespace bps::tensor {
namespace {

constexpr std::uint32_t kTensors = 1000;

TEST(KeyMap, MatchesBytePSsGoldenVectors) {
  EXPECT_EQ(djb2(0), 177621U);
  EXPECT_EQ(djb2(1), 177622U);
  EXPECT_EQ(djb2(65536), 210653553582U);
  EXPECT_EQ(djb2(131072), 6951369072467U);
  EXPECT_EQ(djb2(12345678901234), 3046910961280192252U);
  EXPECT_EQ(sdbm(0), 48U);
  EXPECT_EQ(sdbm(65536), 3850799628401345593U);
  EXPECT_EQ(naive(65536), 9973U);
  EXPECT_EQ(naive(65537), 19946U);
  EXPECT_EQ(make_key(7, 3), 7U * 65536 + 3);
}

TEST(KeyMap, PlacesByTheHashOfTheKey) {
  const std::uint64_t key = make_key(12, 5);
  EXPECT_EQ(server_of({.hash = KeyHash::kDjb2, .servers = 7}, 12, 5), djb2(key) % 7);
  EXPECT_EQ(server_of({.hash = KeyHash::kSdbm, .servers = 7}, 12, 5), sdbm(key) % 7);
  EXPECT_EQ(server_of({.hash = KeyHash::kNaive, .servers = 7}, 12, 5), naive(key) % 7);
  // FNV-1a of "786437", worked out apart: every standard library must agree, for ever.
  EXPECT_EQ(server_of({.hash = KeyHash::kBuiltIn, .servers = 1009}, 12, 5), 0x51313bb9c3e8255aU % 1009);
}

std::vector<std::uint32_t> random_ids() {
  std::mt19937 random(5);
  std::vector<std::uint32_t> ids(kTensors);
  std::generate(ids.begin(), ids.end(), [&] { return static_cast<std::uint32_t>(random() % 1'000'000'000); });
  return ids;
}

std::vector<std::uint32_t> every(std::uint32_t stride) {
  std::vector<std::uint32_t> ids(kTensors);
  for (std::uint32_t i = 0; i < kTensors; ++i) ids[i] = i * stride;
  return ids;
}

// The largest number of partitions on a server over the mean.
double imbalance(const KeyMapConfig& config, const std::vector<std::uint32_t>& ids, std::uint64_t partitions) {
  std::vector<double> count(config.servers);
  for (const std::uint32_t id : ids) {
    for (std::uint64_t i = 0; i < partitions; ++i) {
      const std::uint32_t server = server_of(config, id, i);
      EXPECT_LT(server, config.servers);
      ++count.at(server);
    }
  }
  const double mean = static_cast<double>(ids.size() * partitions) / config.servers;
  return *std::max_element(count.begin(), count.end()) / mean;
}

TEST(KeyMap, RawSpreadsTensorsOfOnePartition) {
  for (const std::uint32_t servers : {1U, 2U, 3U, 4U, 8U}) {
    const KeyMapConfig config{.hash = KeyHash::kRaw, .servers = servers};
    EXPECT_LE(imbalance(config, random_ids(), 1), 1.5) << servers;
    for (const std::uint32_t stride : {1U, 2U, 3U, 8U, 16U, 65536U}) {
      EXPECT_LE(imbalance(config, every(stride), 1), 1.5) << servers << " servers, stride " << stride;
    }
  }
}

TEST(KeyMap, RawSpreadsThePartitionsOfOneTensorEvenly) {
  for (const std::uint32_t servers : {1U, 2U, 3U, 4U, 8U}) {
    for (const std::uint32_t id : {0U, 1U, 17U, 999'999'999U}) {
      std::vector<int> count(servers);
      for (std::uint64_t i = 0; i < 25; ++i) {
        ++count.at(server_of({.hash = KeyHash::kRaw, .servers = servers}, id, i));
      }
      const auto [least, most] = std::minmax_element(count.begin(), count.end());
      EXPECT_LE(*most - *least, 1) << servers << " servers, tensor " << id;
    }
  }
}

TEST(KeyMap, EveryHashStaysWithinTheServers) {
  for (const KeyHash hash : {KeyHash::kRaw, KeyHash::kDjb2, KeyHash::kNaive, KeyHash::kBuiltIn, KeyHash::kSdbm,
                             KeyHash::kMixed, KeyHash::kBalanced}) {
    EXPECT_EQ(server_of({.hash = hash, .servers = 0}, 1, 1), 0U);
    for (const std::uint32_t servers : {1U, 2U, 5U}) {
      for (const std::uint32_t workers : {0U, 1U, 2U, 5U, 9U}) {
        imbalance({.hash = hash, .servers = servers, .workers = workers}, random_ids(), 2);
      }
    }
    EXPECT_EQ(parse_key_hash(to_string(hash)), hash);
  }
}

TEST(KeyMap, MixedGivesExtraServersTheirShare) {
  // 4 workers with a server each, 2 extra servers, which come first: ratio 2*2*3 / (4*6 - 2*2) = 0.6.
  const KeyMapConfig config{.hash = KeyHash::kMixed, .servers = 6, .workers = 4};
  double extra = 0;
  for (const std::uint32_t id : random_ids()) {
    const std::uint64_t hash = djb2(make_key(id, 0)) % 101;
    const std::uint32_t server = server_of(config, id, 0);
    EXPECT_EQ(server, hash < 61 ? djb2(hash) % 2 : 2 + djb2(hash) % 4);
    extra += server < 2 ? 1.0 / kTensors : 0;
  }
  EXPECT_NEAR(extra, 0.6, 0.08);
}

TEST(KeyMap, MixedWithoutExtraServersUsesAll) {
  const KeyMapConfig config{.hash = KeyHash::kMixed, .servers = 2, .workers = 4};
  EXPECT_LT(imbalance(config, random_ids(), 1), 1.9);
}

constexpr KeyHash kHashes[] = {KeyHash::kRaw,  KeyHash::kDjb2,  KeyHash::kNaive,   KeyHash::kBuiltIn,
                               KeyHash::kSdbm, KeyHash::kMixed, KeyHash::kBalanced};

// Servers 0 to `servers` - 1, but those that are lost.
KeyMapConfig without(KeyHash hash, std::uint32_t servers, const std::vector<std::uint32_t>& lost) {
  KeyMapConfig config{.hash = hash, .servers = servers, .workers = 2};
  for (std::uint32_t i = 0; i < servers; ++i) config.slots.push_back(i);
  for (const std::uint32_t i : lost) config.slots[i] = kNoServer;
  return config;
}

TEST(KeyMap, WhileNoServerIsLostSlotsChangeNothing) {
  for (const KeyHash hash : kHashes) {
    for (const std::uint32_t servers : {1U, 2U, 3U, 8U}) {
      const KeyMapConfig plain{.hash = hash, .servers = servers, .workers = 2};
      for (const std::uint32_t id : random_ids()) {
        EXPECT_EQ(server_of(without(hash, servers, {}), id, 3), server_of(plain, id, 3)) << to_string(hash);
      }
    }
  }
}

TEST(KeyMap, OnlyTheKeysOfALostServerMove) {
  for (const KeyHash hash : kHashes) {
    // Also of a second one, and of a third; in the other direction: of one that enters in the place of a lost one.
    const std::vector<std::vector<std::uint32_t>> losses{{}, {2}, {2, 0}, {2, 0, 4}, {0, 4}};
    for (std::size_t i = 0; i + 1 < losses.size(); ++i) {
      const KeyMapConfig before = without(hash, 5, losses[i]);
      const KeyMapConfig after = without(hash, 5, losses[i + 1]);
      for (const std::uint32_t id : random_ids()) {
        for (const std::uint64_t partition : {0, 1, 7}) {
          const std::uint32_t was = server_of(before, id, partition);
          const std::uint32_t is = server_of(after, id, partition);
          ASSERT_EQ(std::ranges::count(losses[i + 1], is), 0) << "it is lost";
          if (was == is) continue;
          const bool has_lost_it = std::ranges::count(losses[i + 1], was) > 0;
          const bool has_come = std::ranges::count(losses[i], is) > 0;
          ASSERT_TRUE(has_lost_it || has_come) << to_string(hash) << ": from " << was << " to " << is;
        }
      }
    }
  }
}

TEST(KeyMap, WhatALostServerHadIsSpreadEvenly) {
  for (const KeyHash hash : kHashes) {
    const KeyMapConfig before = without(hash, 5, {});
    const KeyMapConfig after = without(hash, 5, {1});
    std::vector<double> came(5);
    double all = 0;
    for (const std::uint32_t id : random_ids()) {
      for (std::uint64_t partition = 0; partition < 4; ++partition) {
        if (server_of(before, id, partition) != 1) continue;
        ++came[server_of(after, id, partition)];
        ++all;
      }
    }
    for (const std::uint32_t server : {0, 2, 3, 4}) {
      EXPECT_NEAR(came[server] / all, 0.25, 0.06) << to_string(hash) << ", server " << server;
    }
  }
}

TEST(KeyMap, RawSpreadsThePartitionsOfOneTensorEvenlyOverWhoIsLeft) {
  constexpr std::uint64_t kPieces = 5 * 4 * 3;  // each digit of the hash takes each value as often
  for (const std::uint32_t id : {0U, 1U, 17U, 999'999'999U}) {
    const std::vector<std::pair<std::vector<std::uint32_t>, int>> cases{{{1}, 4}, {{1, 4}, 3}};
    for (const auto& [lost, left] : cases) {
      const KeyMapConfig config = without(KeyHash::kRaw, 5, lost);
      std::vector<int> count(5);
      for (std::uint64_t i = 0; i < kPieces; ++i) ++count[server_of(config, id, i)];
      for (std::uint32_t server = 0; server < 5; ++server) {
        const bool is_lost = std::ranges::count(lost, server) > 0;
        EXPECT_EQ(count[server], is_lost ? 0 : static_cast<int>(kPieces) / left) << "tensor " << id;
      }
    }
  }
}

TEST(KeyMap, RefusesUnknownNamesAndListsTheKnown) {
  try {
    parse_key_hash("md5");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(error.hint().find("raw, djb2"), std::string::npos);
  }
}

TEST(KeyMap, BalancedPutsEachPieceOnTheServerWithTheFewestBytes) {
  std::vector<std::uint64_t> load{10, 0, 4};
  const BalancedPlacement placement(load, Partitioning(23, 1, 5));  // four pieces of 5 and one of 3
  std::vector<std::uint32_t> servers;
  for (std::uint64_t piece = 0; piece < 5; ++piece) servers.push_back(placement.slot(piece));
  EXPECT_EQ(servers, (std::vector<std::uint32_t>{1, 2, 1, 2, 0}));  // 5 4, 5 9, 10 9, 10 14, 13: the first of equals
  EXPECT_EQ(load, (std::vector<std::uint64_t>{13, 10, 14}));
  EXPECT_EQ(BalancedPlacement({}, Partitioning(23, 1, 5)).slot(4), 0U);
}

TEST(KeyMap, BalancedPlacesRunsOfPiecesInTensorsOfVeryMany) {
  std::vector<std::uint64_t> load(3);
  const Partitioning cut(10'000'000, 1, 8);
  const BalancedPlacement placement(load, cut);
  std::vector<std::uint64_t> placed(3);
  for (std::uint64_t piece = 0; piece < cut.count(); ++piece) {
    placed[placement.slot(piece)] += cut.piece(piece).length;
  }
  EXPECT_EQ(load, placed);
  EXPECT_LT(static_cast<double>(std::ranges::max(placed)), 1.001 * 10'000'000 / 3);
}

}  // namespace
}  // namespace bps::tensor
