// SPDX-License-Identifier: Apache-2.0
#include "van/registry.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <set>

#include "core/clock.h"
#include "core/dtype.h"
#include "tensor/key_map.h"

namespace bps::van {
namespace {

constexpr auto kFloat32 = static_cast<std::uint8_t>(Dtype::kFloat32);
constexpr auto kFloat64 = static_cast<std::uint8_t>(Dtype::kFloat64);
using Ranks = std::vector<std::uint32_t>;

TensorSpec spec(const std::string& name, std::uint8_t dtype = kFloat32, std::uint32_t group = 0) {
  return {group, name, dtype, 12, "(3, 4)"};
}
Registry::Declared declare(Registry& registry, std::uint32_t rank, const std::vector<TensorSpec>& specs) {
  return registry.declare(rank, specs);
}

TEST(Registry, IdsDependOnNamesOnly) {
  Registry one({.workers = 2});
  Registry other({.workers = 2});
  const auto forth = declare(one, 0, {spec("a"), spec("b"), spec("c")});
  const auto back = declare(other, 1, {spec("c"), spec("b"), spec("a")});
  ASSERT_EQ(forth.ids.size(), 3U);
  EXPECT_EQ(forth.ids[0], back.ids[2]);
  EXPECT_EQ(forth.ids[1], back.ids[1]);
  EXPECT_EQ(forth.ids[2], back.ids[0]);
  EXPECT_EQ(declare(one, 1, {spec("b")}).ids[0], forth.ids[1]) << "and every rank gets the same";
  EXPECT_EQ(forth.ids[0].id, 935657240U) << "FNV-1a of group and name, folded: traces and tools know it";
}

TEST(Registry, WhatOneRankMakesItKeepIsBounded) {
  Registry registry({.workers = 3, .most_kept = 100'000});
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 1000; ++i) specs.push_back(spec("step " + std::to_string(i)));
  const auto refused = declare(registry, 1, specs);
  EXPECT_TRUE(refused.is_too_much);
  EXPECT_GT(refused.ids.size(), 100U) << "those before";
  EXPECT_NE(refused.problem.find("is one too many: what rank 1 was the first to declare"), std::string::npos)
      << refused.problem;
  EXPECT_EQ(declare(registry, 2, {specs[0]}).ids, std::vector(1, refused.ids[0])) << "others are not held up";
  EXPECT_EQ(declare(registry, 2, {spec("mine")}).problem, "");
  EXPECT_EQ(declare(registry, 1, {spec("mine")}).problem, "") << "nor is it, by what is known";
  std::vector<TensorSpec> of_two(specs.begin() + 500, specs.begin() + 510);
  EXPECT_EQ(declare(registry, 0, of_two).problem, "");
  const Ranks pair{0, 1};
  const std::uint64_t cost = Registry::bytes_of(pair, "g");
  EXPECT_NE(registry.keep(1, cost, "group 'g'"), "") << "of one account";
  std::size_t groups = 0;
  while (groups < 10'000 && registry.keep(2, cost, "group 'g'").empty()) ++groups;
  EXPECT_GT(groups, 100U);
  EXPECT_LT(groups, 1000U);
  registry.give_back(2, cost);
  EXPECT_EQ(registry.keep(2, cost, "group 'g'"), "");
}

TEST(Registry, CollisionsGetNeighbours) {
  Registry registry({.workers = 1, .hash = [](std::uint32_t, std::string_view) { return (1ULL << 30) - 1; }});
  const auto ids = declare(registry, 0, {spec("a"), spec("b"), spec("c")}).ids;
  ASSERT_EQ(ids.size(), 3U);
  EXPECT_EQ(ids[0].id, (1U << 30) - 1);
  EXPECT_EQ(ids[1].id, 1U) << "0 is never an id";
  EXPECT_EQ(ids[2].id, 2U);
  EXPECT_EQ(declare(registry, 0, {spec("b")}).ids[0].id, 1U);
}

TEST(Registry, MismatchNamesTensorRanksAndShapes) {
  Registry registry({.workers = 4});
  const auto id = declare(registry, 0, {spec("w")}).ids[0].id;
  EXPECT_EQ(declare(registry, 3, {spec("w")}).problem, "");
  const auto odd = declare(registry, 1, {spec("v"), spec("w", kFloat64)});
  EXPECT_EQ(odd.problem, "tensor 'w' is float32 (3, 4) on rank 0 but float64 (3, 4) on rank 1");
  ASSERT_EQ(odd.conflicts.size(), 1U);
  EXPECT_EQ(odd.conflicts[0].tensor, id);
  EXPECT_EQ(odd.conflicts[0].text, odd.problem);
  EXPECT_EQ(odd.conflicts[0].ranks, (Ranks{0, 3}));

  const auto late = declare(registry, 2, {spec("w")});
  EXPECT_EQ(late.problem, odd.problem) << "who comes later must not wait for rank 1";
  EXPECT_TRUE(late.conflicts.empty());
}

TEST(Registry, ARankThatContradictsItselfHarmsNobodyElse) {
  Registry registry({.workers = 2});
  EXPECT_EQ(declare(registry, 0, {spec("w")}).problem, "");
  EXPECT_EQ(declare(registry, 1, {spec("w")}).problem, "");
  const auto again = declare(registry, 1, {spec("w", kFloat64)});
  EXPECT_NE(again.problem, "");
  EXPECT_TRUE(again.conflicts.empty());
  EXPECT_EQ(declare(registry, 0, {spec("w")}).problem, "");
}

TEST(Registry, CountsFurtherMismatches) {
  Registry registry({.workers = 2});
  EXPECT_EQ(declare(registry, 0, {spec("a"), spec("b"), spec("c")}).problem, "");
  const auto odd = declare(registry, 1, {spec("a", kFloat64), spec("b", kFloat64), spec("c")});
  EXPECT_EQ(odd.problem,
            "tensor 'a' is float32 (3, 4) on rank 0 but float64 (3, 4) on rank 1 (and 1 more tensors like it)");
  EXPECT_EQ(odd.conflicts.size(), 2U);
}

TEST(Registry, GroupsKeepNamesApart) {
  Registry registry({.workers = 4});
  EXPECT_EQ(registry.group(0)->ranks, (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(registry.group(1), nullptr);
  const Group& pair = registry.add_group({1, 3}, "tp");
  EXPECT_EQ(registry.find_group({1, 3}, "tp"), &pair);
  EXPECT_EQ(registry.find_group({1, 3}, "dp"), nullptr);
  const auto ids = declare(registry, 1, {spec("w"), spec("w", kFloat64, pair.id)}).ids;
  ASSERT_EQ(ids.size(), 2U);
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_EQ(declare(registry, 0, {spec("w", kFloat64, pair.id)}).problem,
            "tensor 'w' belongs to group 1 (ranks 1, 3), rank 0 does not");
  EXPECT_EQ(declare(registry, 0, {spec("w", kFloat64, 2)}).problem,
            "tensor 'w' names the group 2, which does not exist");
}

TEST(Registry, GroupsAreChecked) {
  const Registry registry({.workers = 4});
  EXPECT_EQ(registry.check_group({0, 2}, 2), "");
  EXPECT_EQ(registry.check_group({}, 0), "a group needs at least one rank");
  EXPECT_NE(registry.check_group({2, 0}, 0), "");
  EXPECT_NE(registry.check_group({0, 0}, 0), "");
  EXPECT_EQ(registry.check_group({0, 4}, 0), "rank 4 does not exist: the job has 4 workers");
  EXPECT_EQ(registry.check_group({0, 2}, 1), "rank 1 is not a member of the group it asks for (ranks 0, 2)");
}

TEST(Registry, BalancedAnswersWithTheLoadBefore) {
  const tensor::CutRule cut{.partition_bytes = 100, .min_partition_bytes = 8, .server_loops = 2};
  Registry registry({.workers = 2, .servers = 2, .balanced = true, .cut = cut});
  const TensorSpec big{0, "big", kFloat32, 75, "(75,)"};  // 300 bytes: pieces of 100
  const TensorSpec small{0, "small", kFloat32, 10, "(10,)"};
  const auto ids = declare(registry, 0, {big, small, spec("w")}).ids;
  ASSERT_EQ(ids.size(), 3U);
  EXPECT_EQ(ids[0].server_load, (std::vector<std::uint64_t>{0, 0}));
  EXPECT_EQ(ids[1].server_load, (std::vector<std::uint64_t>{200, 100}));
  EXPECT_EQ(ids[2].server_load, (std::vector<std::uint64_t>{200, 140}));
  EXPECT_EQ(declare(registry, 1, {small}).ids[0], ids[1]) << "placed once, when first declared";
}

// What the scheduler accounts for is what every worker places, for tensors of any size and element type.
TEST(Registry, BalancedAccountsForWhatTheWorkersPlace) {
  for (const std::uint32_t servers : {1U, 2U, 4U, 7U}) {
    for (const std::uint64_t limit : {std::uint64_t{4'096'000}, std::uint64_t{512} << 10, std::uint64_t{1000}}) {
      const tensor::CutRule cut{.partition_bytes = limit, .server_loops = servers * 2};
      Registry registry({.workers = 1, .servers = servers, .balanced = true, .cut = cut});
      std::vector<std::uint64_t> placed(servers);
      std::uint64_t largest = 0;
      for (std::uint64_t i = 0; i < 200; ++i) {
        const Dtype dtype = i % 3 == 0 ? Dtype::kFloat32 : Dtype::kUint8;
        const std::uint64_t count = (i * 7919 + i * i * 104'729) % 3'000'000;
        const TensorSpec one{0, "t" + std::to_string(i), static_cast<std::uint8_t>(dtype), count, ""};
        const TensorId id = declare(registry, 0, {one}).ids.at(0);
        EXPECT_EQ(id.server_load, placed) << "tensor " << i;
        std::vector<std::uint64_t> load = id.server_load;
        const tensor::Partitioning pieces = cut.cut(count * size_of(dtype), static_cast<std::uint32_t>(size_of(dtype)));
        const tensor::BalancedPlacement placement(load, pieces);
        for (std::uint64_t p = 0; p < pieces.count(); ++p) {
          placed[placement.slot(p)] += pieces.piece(p).length;
          largest = std::max(largest, pieces.piece(p).length);
        }
        EXPECT_EQ(load, placed) << "tensor " << i;
      }
      const auto [least, most] = std::ranges::minmax(placed);
      EXPECT_LE(most - least, largest) << "greedy placement differs by one piece at most";
    }
  }
}

TEST(Registry, BalancedIsEvenForTensorsOfOnePartition) {
  const tensor::CutRule cut{.server_loops = 4};
  Registry registry({.workers = 1, .servers = 4, .balanced = true, .cut = cut});
  std::vector<std::uint64_t> placed(4);
  for (int i = 0; i < 100; ++i) {
    const TensorSpec one{0, "t" + std::to_string(i), kFloat32, 128 << 10, ""};
    std::vector<std::uint64_t> load = declare(registry, 0, {one}).ids.at(0).server_load;
    const tensor::Partitioning pieces = cut.cut(512 << 10, 4);
    const tensor::BalancedPlacement placement(load, pieces);
    for (std::uint64_t p = 0; p < pieces.count(); ++p) placed[placement.slot(p)] += pieces.piece(p).length;
  }
  EXPECT_LE(static_cast<double>(std::ranges::max(placed)), 1.05 * (100 * 512 << 10) / 4);
}

// In whatever order they are declared in the next view.
TEST(Registry, BalancedPlacesKnownTensorsFromTheLoadOfTheViewBefore) {
  const tensor::CutRule cut{.partition_bytes = 100, .min_partition_bytes = 8, .server_loops = 2};
  Registry::Options options{.workers = 1, .servers = 2, .balanced = true, .cut = cut};
  const TensorSpec big{0, "big", kFloat32, 75, "(75,)"};
  const TensorSpec small{0, "small", kFloat32, 10, "(10,)"};
  const TensorSpec last{0, "last", kFloat32, 20, "(20,)"};
  Registry first(options);
  const auto before = declare(first, 0, {big, small, last}).ids;
  options.before = first.placements();
  const Registry nothing_was_declared(options);
  EXPECT_EQ(nothing_was_declared.placements(), options.before);
  Registry next(options);
  EXPECT_EQ(declare(next, 0, {last}).ids[0], before[2]);
  EXPECT_EQ(declare(next, 0, {small}).ids[0], before[1]);
  // One that is new goes where there is least: `last` is on slot 1, `small` on slot 1 too, 80 and 40 bytes.
  EXPECT_EQ(declare(next, 0, {spec("new")}).ids[0].server_load, (std::vector<std::uint64_t>{0, 120}));
  options.servers = 3;
  Registry other(options);
  EXPECT_EQ(declare(other, 0, {last}).ids[0].server_load.size(), 3U);
}

TEST(Registry, WithoutBalancedThereIsNoLoad) {
  Registry registry({.workers = 1, .servers = 2});
  EXPECT_TRUE(declare(registry, 0, {spec("w")}).ids[0].server_load.empty());
}

TEST(Registry, TenThousandTensorsInOneCall) {
  Registry registry({.workers = 2});
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 10'000; ++i) specs.push_back(spec("model.layers." + std::to_string(i) + ".weight"));
  const std::clock_t start = std::clock();  // processor time: the machine may be busy
  const auto ids = declare(registry, 0, specs).ids;
  EXPECT_LT(std::clock() - start, 5 * CLOCKS_PER_SEC) << "a few milliseconds; the sanitizers take longer";
  std::set<std::uint32_t> different;
  for (const TensorId& id : ids) {
    EXPECT_GT(id.id, 0U);
    EXPECT_LT(id.id, 1U << 30);
    different.insert(id.id);
  }
  EXPECT_EQ(different.size(), 10'000U);
  EXPECT_EQ(declare(registry, 1, specs).ids, ids);
}

}  // namespace
}  // namespace bps::van
