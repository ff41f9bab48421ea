// SPDX-License-Identifier: Apache-2.0
// Rounds of partitions that this server keeps: see stored_partition.h.
#include <algorithm>
#include <new>
#include <utility>

#include "server/round_engine.h"

namespace bps::server {
namespace {

std::uint64_t key_of(const RoundKey& key) {
  return std::uint64_t{key.tensor} << 32 | key.partition;
}

}  // namespace

// A group that nobody has made: of the rank that sends, and so as many as there are ranks.
const RoundGroup* RoundEngine::add_alone(std::uint32_t rank) {
  const std::uint32_t id = tensor::kAlone | rank;
  const auto [place, fresh] =
      groups_.emplace(id, std::make_unique<RoundGroup>(van::Group{id, {rank}}, hosts_, limits_.here));
  return latest_group_ = place->second.get();
}

StoredPartition* RoundEngine::find_stored(const RoundKey& key) {
  const auto found = stored_.find(key_of(key));
  return found == stored_.end() ? nullptr : &found->second;
}

// Where the result of a round that everybody takes part in is kept from now on: one more target of the pass. Null:
// there is no memory for it, and the round has failed.
std::byte* RoundEngine::store(Round& round) {
  try {
    StoredPartition& stored = stored_[key_of(round.key)];
    go_on(stored, true);  // of the weights before, nobody waits for anybody any more
    stored.dtype = round.first.dtype;
    stored.bytes.resize(round.first.length);
    stored.ranks = round.group->group.ranks;
    stored.additions.assign(stored.ranks.size(), 0);
    return stored.bytes.data();
  } catch (const std::bad_alloc&) {
    fail(round, {ErrorCode::kInternal, "the server has no memory to keep these weights", "use more servers"});
    return nullptr;
  }
}

// Adds what a rank has sent, and answers with what is there then, unless the rank is too far ahead.
void RoundEngine::accumulate(Round& round) {
  StoredPartition* const stored = find_stored(round.key);
  const std::size_t place = stored == nullptr ? 0 : stored->place_of(round.group->group.ranks.front());
  if (stored == nullptr || place == stored->ranks.size()) {
    return fail(round, {ErrorCode::kInvalidArgument, "the servers keep no weights of this name and group",
                        "call store() with it first, on every rank"});
  }
  if (stored->dtype != round.first.dtype || stored->bytes.size() != round.first.length) {
    return fail(round, {ErrorCode::kMismatch, "the servers keep weights of another dtype or size under this name",
                        "add arrays like the one that was stored"});
  }
  plan_.read_from(round);
  plan_.sources.insert(plan_.sources.begin(), {.bytes = stored->bytes.data()});
  const bool needs_slot = plan_.write_to(round);
  if (needs_slot && !find_result_slot(round)) return wait(round);
  const std::uint64_t count = stored->additions[place] + 1;
  const auto is_gone = [this](std::uint32_t rank) { return is_gone_rank(rank); };
  stored->additions[place] = count;
  const bool waits = !stored->may_go_on(count, round.first.place, is_gone);
  if (waits) plan_.targets.clear();
  if (!waits && needs_slot) plan_.targets.push_back({.bytes = round.result->payload()});
  plan_.targets.push_back({.bytes = stored->bytes.data()});
  WorkerSession* broken = nullptr;
  if (summer_.sum({stored->dtype, ReduceOp::kSum, 1}, round.first.length, plan_, broken) != Status::kOk) {
    return broken->lose("its memory cannot be reached");
  }
  if (waits) {
    round.held_at = count;
    stored->waiting.push_back(round.number_in_table);
  } else {
    answer_all(round, round.result == nullptr ? nullptr : round.result->payload());
  }
  if (!stored->waiting.empty()) go_on(*stored, false);
}

// Answers the rounds that have waited long enough, or `whatever` they wait for.
void RoundEngine::go_on(StoredPartition& stored, bool whatever) {
  const auto is_gone = [this](std::uint32_t rank) { return is_gone_rank(rank); };
  std::vector<std::size_t> waiting = std::exchange(stored.waiting, {});
  std::erase_if(waiting, [&](std::size_t number) {
    Round& round = table_.by_number(number);
    if (round.held_at == 0 || find_stored(round.key) != &stored) return true;  // it was given up
    if (!whatever && !stored.may_go_on(round.held_at, round.first.place, is_gone)) return false;
    round.held_at = 0;
    plan_.sources.assign(1, {.bytes = stored.bytes.data()});
    if (plan_.write_to(round)) plan_.targets.push_back({.bytes = round.result->payload()});
    WorkerSession* broken = nullptr;
    if (summer_.sum({stored.dtype, ReduceOp::kSum, 1}, round.first.length, plan_, broken) != Status::kOk) {
      broken->lose("its memory cannot be reached");
    } else {
      answer_all(round, round.result == nullptr ? nullptr : round.result->payload());
    }
    return true;
  });
  stored.waiting.insert(stored.waiting.end(), waiting.begin(), waiting.end());
}

std::vector<std::uint32_t> RoundEngine::ranks_behind(const Round& round) const {
  std::vector<std::uint32_t> ranks;
  const auto found = stored_.find(key_of(round.key));
  if (found == stored_.end()) return ranks;
  const StoredPartition& stored = found->second;
  for (std::size_t i = 0; i < stored.ranks.size(); ++i) {
    const bool is_behind = stored.additions[i] + round.first.place <= round.held_at;
    if (is_behind && !is_gone_rank(stored.ranks[i])) ranks.push_back(stored.ranks[i]);
  }
  return ranks;
}

}  // namespace bps::server
