// SPDX-License-Identifier: Apache-2.0
#include "server/round_table.h"

#include <memory>
#include <utility>

namespace bps::server {
namespace {

// How many rounds of one key a rank may start before another rank starts its first. All calls without a name that have
// the same dtype and size share one key, so a deep model reaches large numbers, and not only a loop that never waits.
// The bound keeps a wrong round number from costing memory.
constexpr std::uint32_t kFarthestAhead = 1 << 16;

}  // namespace

bool KeyRounds::is_over(std::uint32_t ahead) const {
  if (ahead < 64) return (over >> ahead & 1) != 0;
  const std::size_t word = ahead / 64 - 1;
  return word < beyond.size() && (beyond[word] >> ahead % 64 & 1) != 0;
}

void KeyRounds::end(std::uint32_t ahead) {
  if (ahead < 64) {
    over |= std::uint64_t{1} << ahead;
  } else {
    const std::size_t word = ahead / 64 - 1;
    if (word >= beyond.size()) beyond.resize(word + 1);
    beyond[word] |= std::uint64_t{1} << ahead % 64;
  }
  while ((over & 1) != 0) {
    ++all_over_below;
    over >>= 1;
    std::uint64_t* before = &over;
    for (std::uint64_t& word : beyond) {
      *before |= word << 63;
      word >>= 1;
      before = &word;
    }
  }
  while (!beyond.empty() && beyond.back() == 0) beyond.pop_back();
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
  const std::uint32_t ahead = number - found->second.all_over_below;
  return ahead >= (std::uint32_t{1} << 31) || found->second.is_over(ahead);
}

RoundTable::Lookup RoundTable::find_or_open(const RoundKey& key, std::uint32_t number, const RoundGroup& group,
                                            TableShare& opener) {
  const auto known = keys_.find(key);
  KeyRounds* state = known == keys_.end() ? nullptr : &known->second;
  for (Round* round = state == nullptr ? nullptr : state->open; round != nullptr; round = round->in_table.next_of_key) {
    if (round->number == number) return {Found::kOpen, round};
  }
  // Serial arithmetic: round numbers may wrap in a very long job.
  const std::uint32_t ahead = number - (state == nullptr ? 0 : state->all_over_below);
  if (ahead >= (std::uint32_t{1} << 31)) return {Found::kOver, nullptr};
  if (ahead >= kFarthestAhead) return {Found::kTooFarAhead, nullptr};
  if (state != nullptr && state->is_over(ahead)) return {Found::kOver, nullptr};
  // Only what its opener pays for grows a key: rounds of others end when all of them have come.
  const bool grows = state == nullptr || (state->opener == &opener && ahead >= 64);
  if (opener.rounds >= limits_.rounds || (grows && opener.words >= limits_.words)) return {Found::kTooMany, nullptr};

  if (state == nullptr) {
    state = &keys_[key];
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

  const std::uint64_t before = state.beyond.size();
  state.end(round->number - state.all_over_below);
  state.opener->words += state.beyond.size() - before;
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
