// SPDX-License-Identifier: Apache-2.0
// All inputs of choose_route(): what must hold for each, and how many of them take which route.
#include "worker/route.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <utility>
#include <vector>

namespace bps::worker {
namespace {

constexpr std::size_t kReaches = 5;

// Those that a worker loop can ask about: encoded operations have one phase, and of memory that is not registered it is
// not known what a process of this host can do with it.
std::vector<RouteFacts> all_facts() {
  std::vector<RouteFacts> all;
  for (std::uint32_t bits = 0; bits < 1U << 5; ++bits) {
    for (std::size_t reach = 0; reach < kReaches; ++reach) {
      RouteFacts facts;
      const std::array<bool*, 5> flags = {&facts.is_encoded, &facts.is_registered, &facts.is_two_phase,
                                          &facts.is_continuation, &facts.lands_in_order};
      for (std::size_t i = 0; i < flags.size(); ++i) *flags[i] = (bits >> i & 1) != 0;
      facts.reach = static_cast<Reach>(reach);
      if (facts.is_encoded && facts.is_two_phase) continue;
      if (!facts.is_registered && facts.reach > Reach::kUnreadable) continue;
      all.push_back(facts);
    }
  }
  return all;
}

TEST(Route, UsesTheCallersMemoryOnlyWhereThatIsSafe) {
  for (const RouteFacts& facts : all_facts()) {
    const Route route = choose_route(facts).route;
    if (route != Route::kInPlace) continue;
    EXPECT_FALSE(facts.is_encoded);
    EXPECT_TRUE(facts.is_registered);
    EXPECT_TRUE(facts.reach == Reach::kNetwork || facts.reach == Reach::kReachable);
  }
}

TEST(Route, ReadsTheCallersMemoryOnlyWhereThatIsPossible) {
  for (const RouteFacts& facts : all_facts()) {
    if (choose_route(facts).route != Route::kAnswersAside) continue;
    EXPECT_TRUE(facts.is_registered);
    EXPECT_TRUE(facts.is_two_phase) << "or the answer could go to the caller's memory, too";
    EXPECT_TRUE(facts.reach == Reach::kNetwork || facts.reach >= Reach::kReadable);
  }
}

TEST(Route, KeepsTheInputUntilTheResultIsFinal) {
  for (const RouteFacts& facts : all_facts()) {
    const auto [route, finality] = choose_route(facts);
    if (route != Route::kInPlace || !awaits_commit(finality)) continue;
    EXPECT_FALSE(facts.is_continuation);
    EXPECT_TRUE(facts.lands_in_order);
  }
}

TEST(Route, WaitsForTheCommitInTwoPhases) {
  for (const RouteFacts& facts : all_facts())
    EXPECT_EQ(awaits_commit(choose_route(facts).finality), facts.is_two_phase);
}

// Whoever adds a fact or a route sees here how many cases change.
TEST(Route, TakesEachRouteAsOftenAsEver) {
  std::map<std::pair<Route, Finality>, int> cases;
  for (const RouteFacts& facts : all_facts()) {
    const auto [route, finality] = choose_route(facts);
    ++cases[{route, finality}];
  }
  const std::map<std::pair<Route, Finality>, int> expected = {
      {{Route::kInPlace, Finality::kAnswer}, 8},       {{Route::kInPlace, Finality::kCommit}, 2},
      {{Route::kAnswersAside, Finality::kCommit}, 10}, {{Route::kStaged, Finality::kAnswer}, 24},
      {{Route::kStaged, Finality::kCommit}, 20},       {{Route::kEncoded, Finality::kAnswer}, 32},
  };
  EXPECT_EQ(cases, expected);
}

// What users have most: one line for each.
TEST(Route, OfTheCommonCases) {
  const auto route_of = [](Reach reach, bool is_two_phase, bool lands_in_order) {
    return choose_route(
        {.is_registered = true, .is_two_phase = is_two_phase, .lands_in_order = lands_in_order, .reach = reach});
  };
  constexpr Chosen kPlain{Route::kInPlace, Finality::kAnswer};
  EXPECT_EQ(route_of(Reach::kNetwork, false, true), kPlain) << "over TCP";
  EXPECT_EQ(route_of(Reach::kNetwork, false, false), kPlain) << "over RDMA";
  EXPECT_EQ(route_of(Reach::kReachable, false, false), kPlain) << "on one host";
  EXPECT_EQ(route_of(Reach::kUnreadable, false, false), (Chosen{Route::kStaged, Finality::kAnswer}));
  EXPECT_EQ(route_of(Reach::kNetwork, true, true), (Chosen{Route::kInPlace, Finality::kCommit}));
  EXPECT_EQ(route_of(Reach::kNetwork, true, false), (Chosen{Route::kAnswersAside, Finality::kCommit}));
  EXPECT_EQ(route_of(Reach::kReachable, true, false), (Chosen{Route::kAnswersAside, Finality::kCommit}));
  EXPECT_EQ(choose_route({.is_encoded = true}), (Chosen{Route::kEncoded, Finality::kAnswer}));
}

}  // namespace
}  // namespace bps::worker
