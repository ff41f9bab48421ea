// SPDX-License-Identifier: Apache-2.0
#include "server/round_table.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

namespace bps::server {
namespace {

constexpr std::uint32_t kBehind = std::uint32_t{1} << 31;  // numbers that are so far ahead count as behind
// A gap so far behind the others is a round that another server has summed, which does not come any more.
constexpr std::uint32_t kFarthestBack = std::uint32_t{1} << 30;

auto run_behind(auto& runs, std::uint32_t base, std::uint32_t number) {
  return std::ranges::partition_point(runs, [=](const auto& run) { return run.first - base <= number - base; });
}

}  // namespace

bool KeyRounds::is_over(std::uint32_t number) const {
  if (number - all_over_below >= kBehind) return true;
  if (over.empty()) return false;  // is the rule: the ranks are at most one round apart
  const auto next = run_behind(over, all_over_below, number);
  return next != over.begin() && number - all_over_below < std::prev(next)->end - all_over_below;
}

void KeyRounds::end(std::uint32_t number) {
  if (number == all_over_below) {
    ++all_over_below;
  } else if (number - all_over_below < kBehind) {
    const auto next = run_behind(over, all_over_below, number);
    const bool extends = next != over.begin() && std::prev(next)->end == number;
    const bool precedes = next != over.end() && next->first == number + 1;
    if (extends && precedes) {
      std::prev(next)->end = next->end;
      over.erase(next);
    } else if (extends) {
      ++std::prev(next)->end;
    } else if (precedes) {
      --next->first;
    } else {
      over.insert(next, {number, number + 1});
    }
  }
  while (!over.empty() && (over.front().first == all_over_below || over.back().end - all_over_below > kFarthestBack)) {
    all_over_below = over.front().end;
    over.erase(over.begin());
  }
}

Round* RoundTable::find(const RoundKey& key, std::uint32_t number) {
  const auto found = keys_.find(key);
  if (found == keys_.end()) return nullptr;
  Round* round = found->second.open;
  while (round != nullptr && round->number != number) round = round->in_table.next_of_key;
  return round;
}

bool RoundTable::is_over(const RoundKey& key, std::uint32_t number) const {
  const auto found = keys_.find(key);
  if (found == keys_.end()) return false;
  return found->second.is_over(number);
}

RoundTable::Lookup RoundTable::find_or_open(const RoundKey& key, std::uint32_t number, const RoundGroup& group,
                                            TableShare& opener) {
  const auto known = keys_.find(key);
  KeyRounds* state = known == keys_.end() ? nullptr : &known->second;
  for (Round* round = state == nullptr ? nullptr : state->open; round != nullptr; round = round->in_table.next_of_key) {
    if (round->number == number) return {Found::kOpen, round};
  }
  if (state != nullptr && state->is_over(number)) return {Found::kOver, nullptr};
  // Other servers may have had the key before.
  const std::uint32_t base = state != nullptr ? state->all_over_below : number - std::min(number, kFarthestBack);
  // A key grows only by what its opener pays for: rounds of others end when all of them have come.
  const bool grows = state == nullptr || (state->opener == &opener && number != base);
  if (opener.rounds >= limits_.rounds || (grows && opener.words >= limits_.words)) return {Found::kTooMany, nullptr};

  if (state == nullptr) {
    state = &keys_[key];
    state->all_over_below = base;
    state->opener = &opener;
    opener.words += kWordsOfKey;
  }
  if (free_.empty()) {
    free_.push_back(&rounds_.emplace_back());
    free_.back()->in_table.number = static_cast<std::uint32_t>(rounds_.size() - 1);
  }
  Round* round = free_.back();
  free_.pop_back();
  round->key = key;
  round->number = number;
  round->history.opened = coarse_now_ns();
  round->group = &group;
  round->contributors = &group.contributors(key.for_host);
  round->arrivals.assign(round->contributors->size(), Arrival());
  round->in_table.opener = &opener;
  ++opener.rounds;
  round->in_table.of_key = state;
  round->in_table.next_of_key = state->open;
  state->open = round;
  round->in_table.open_index = open_.size();
  open_.push_back(round);
  return {Found::kNew, round};
}

void RoundTable::close(Round* round, std::uint64_t now) {
  recorder_.note(*round, now);
  const Round::TableEntry& entry = round->in_table;
  KeyRounds& state = *entry.of_key;
  Round** next = &state.open;
  while (*next != round) next = &(*next)->in_table.next_of_key;
  *next = entry.next_of_key;

  const std::uint64_t before = state.over.size();
  state.end(round->number);
  state.opener->words += state.over.size() - before;
  --entry.opener->rounds;
  open_.back()->in_table.open_index = entry.open_index;
  open_[entry.open_index] = open_.back();
  open_.pop_back();

  auto arrivals = std::move(round->arrivals);
  const std::uint32_t number = entry.number;
  std::destroy_at(round);
  std::construct_at(round);
  round->in_table.number = number;
  round->arrivals = std::move(arrivals);
  free_.push_back(round);
}

}  // namespace bps::server
