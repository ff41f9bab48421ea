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

constexpr std::size_t kReaches = 6;

// Those that a worker loop can ask about: encoded operations have one phase, and of memory that is not registered it is
// not known what a process of this host can do with it.
std::vector<RouteFacts> all_facts() {
  std::vector<RouteFacts> all;
  for (std::uint32_t bits = 0; bits < 1U << 8; ++bits) {
    for (std::size_t reach = 0; reach < kReaches; ++reach) {
      RouteFacts facts;
      const std::array<bool*, 8> flags = {&facts.is_encoded,       &facts.is_registered,   &facts.is_small,
                                          &facts.survives_servers, &facts.is_continuation, &facts.lands_in_order,
                                          &facts.is_logged,        &facts.is_on_device};
      for (std::size_t i = 0; i < flags.size(); ++i) *flags[i] = (bits >> i & 1) != 0;
      facts.reach = static_cast<Reach>(reach);
      if (facts.is_encoded && facts.survives_servers) continue;
      if (facts.is_on_device && facts.is_registered && (facts.is_encoded || facts.reach != Reach::kNetwork)) continue;
      if (!facts.is_registered && facts.reach > Reach::kUnreadable) continue;
      all.push_back(facts);
    }
  }
  return all;
}

bool answers_go_over_inputs(Route route) {
  return is_in_place(route) || route == Route::kStagedIfCheap;
}

TEST(Route, UsesTheCallersMemoryOnlyWhereThatIsSafe) {
  for (const RouteFacts& facts : all_facts()) {
    const Route route = choose_route(facts).route;
    if (!answers_go_over_inputs(route)) continue;
    EXPECT_FALSE(facts.is_encoded);
    EXPECT_TRUE(facts.is_registered);
    EXPECT_TRUE(facts.reach == Reach::kNetwork || facts.reach >= Reach::kCopies);
  }
}

TEST(Route, ReadsTheCallersMemoryOnlyWhereThatIsPossible) {
  for (const RouteFacts& facts : all_facts()) {
    if (choose_route(facts).route != Route::kAnswersAside) continue;
    EXPECT_TRUE(facts.is_registered);
    EXPECT_TRUE(facts.survives_servers) << "or the answer could go to the caller's memory, too";
    EXPECT_TRUE(facts.reach == Reach::kNetwork || facts.reach >= Reach::kReadable);
  }
}

TEST(Route, KeepsTheInputUntilTheResultIsFinal) {
  for (const RouteFacts& facts : all_facts()) {
    const auto [route, finality] = choose_route(facts);
    if (!answers_go_over_inputs(route) || finality == Finality::kAnswer) continue;
    EXPECT_FALSE(facts.is_continuation);
    EXPECT_TRUE(facts.lands_in_order || finality == Finality::kLogged);
  }
}

TEST(Route, HasTheFinalityThatTheServerKeeps) {
  for (const RouteFacts& facts : all_facts()) {
    const auto [route, finality] = choose_route(facts);
    EXPECT_EQ(finality != Finality::kAnswer, facts.survives_servers);
    if (finality == Finality::kLogged) {
      EXPECT_TRUE(facts.is_logged);
      EXPECT_GE(facts.reach, Reach::kUnreadable) << "or nobody could end what writes beside the log";
    }
  }
}

TEST(Route, TakesTheMemoryOfADeviceDirectlyOverANetworkOnly) {
  for (RouteFacts facts : all_facts()) {
    const Chosen chosen = choose_route(facts);
    if (!facts.is_on_device) {
      EXPECT_LT(chosen.route, Route::kDeviceDirect);
      continue;
    }
    EXPECT_GE(chosen.route, Route::kDeviceDirect);
    const bool may_be_direct = !facts.is_encoded && !facts.survives_servers;  // an answer would replace its input
    const bool is_direct = facts.is_registered && may_be_direct && facts.reach == Reach::kNetwork;
    EXPECT_EQ(chosen.route == Route::kDeviceDirect, is_direct);
    EXPECT_NE(is_copied_by_device(chosen.route), is_in_place(chosen.route));
    EXPECT_EQ(is_encoded(chosen.route), facts.is_encoded);
    // A server on this host never gets at it, whatever is known of its memory.
    facts.is_registered = true;
    facts.reach = Reach::kMapped;
    EXPECT_TRUE(is_copied_by_device(choose_route(facts).route));
  }
}

// Whoever adds a fact or a route sees here how many cases change.
TEST(Route, TakesEachRouteAsOftenAsEver) {
  std::map<std::pair<Route, Finality>, int> cases;
  for (const RouteFacts& facts : all_facts()) {
    const auto [route, finality] = choose_route(facts);
    ++cases[{route, finality}];
  }
  const std::map<std::pair<Route, Finality>, int> expected = {
      {{Route::kInPlace, Finality::kAnswer}, 40},      {{Route::kInPlace, Finality::kLogged}, 6},
      {{Route::kInPlace, Finality::kCommit}, 7},       {{Route::kAnswersAside, Finality::kLogged}, 16},
      {{Route::kAnswersAside, Finality::kCommit}, 32}, {{Route::kStagedIfCheap, Finality::kAnswer}, 8},
      {{Route::kStagedIfCheap, Finality::kLogged}, 2}, {{Route::kStagedIfCheap, Finality::kCommit}, 1},
      {{Route::kStaged, Finality::kAnswer}, 96},       {{Route::kStaged, Finality::kLogged}, 16},
      {{Route::kStaged, Finality::kCommit}, 64},       {{Route::kEncoded, Finality::kAnswer}, 144},
      {{Route::kDevice, Finality::kAnswer}, 48},       {{Route::kDeviceEncoded, Finality::kAnswer}, 48},
      {{Route::kDeviceDirect, Finality::kAnswer}, 16}, {{Route::kDevice, Finality::kLogged}, 8},
      {{Route::kDevice, Finality::kCommit}, 56},
  };
  EXPECT_EQ(cases, expected);
}

// What users have most: one row for each.
TEST(Route, OfTheCommonCases) {
  const auto facts = [](Reach reach, bool survives_servers, bool lands_in_order) {
    return RouteFacts{
        .is_registered = true, .survives_servers = survives_servers, .lands_in_order = lands_in_order, .reach = reach};
  };
  constexpr Chosen kPlain{Route::kInPlace, Finality::kAnswer};
  EXPECT_EQ(choose_route(facts(Reach::kNetwork, false, true)), kPlain) << "over TCP";
  EXPECT_EQ(choose_route(facts(Reach::kNetwork, false, false)), kPlain) << "over RDMA";
  EXPECT_EQ(choose_route(facts(Reach::kMapped, false, false)), kPlain) << "arrays of bps_rdma.empty() on one host";
  EXPECT_EQ(choose_route(facts(Reach::kCopies, false, false)), kPlain) << "large tensors of the caller's on one host";
  RouteFacts small = facts(Reach::kCopies, false, false);
  small.is_small = true;
  EXPECT_EQ(choose_route(small), (Chosen{Route::kStagedIfCheap, Finality::kAnswer})) << "and small ones";
  EXPECT_EQ(choose_route(facts(Reach::kUnreadable, false, false)), (Chosen{Route::kStaged, Finality::kAnswer}));
  EXPECT_EQ(choose_route(facts(Reach::kNetwork, true, true)), (Chosen{Route::kInPlace, Finality::kCommit}));
  EXPECT_EQ(choose_route(facts(Reach::kNetwork, true, false)), (Chosen{Route::kAnswersAside, Finality::kCommit}));
  RouteFacts encoded;
  encoded.is_encoded = true;
  EXPECT_EQ(choose_route(encoded), (Chosen{Route::kEncoded, Finality::kAnswer}));
}

}  // namespace
}  // namespace bps::worker
