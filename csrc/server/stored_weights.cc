// SPDX-License-Identifier: Apache-2.0
#include "server/stored_weights.h"

#include <algorithm>
#include <new>
#include <utility>

namespace bps::server {
namespace {

// Returns the key of the weights for an addition. The sender names the group, which must have it among its ranks.
RoundKey stored_key(const Round& round) {
  return {round.first.stored_by(), round.key.tensor, round.key.partition};
}

std::uint32_t most_ahead_of(const Round& round) {
  return tensor::Addition::of(round.first.place).most_ahead;
}

bool is_like(const StoredPartition& stored, const Round& round) {
  return stored.dtype == round.first.dtype && stored.bytes.size() == round.first.length;
}

Reduction added_to(const StoredPartition& stored) {
  return {stored.dtype, ReduceOp::kSum, 1};
}

Error nothing_is_kept() {
  return {ErrorCode::kInvalidArgument, "the servers keep no weights of this name and group",
          "call store() with it first, on every rank"};
}

Error is_not_alike() {
  return {ErrorCode::kMismatch, "the servers keep weights of another dtype or size under this name",
          "pass arrays like the one that was stored"};
}

}  // namespace

StoredPartition* StoredWeights::find(const RoundKey& key) {
  const auto found = partitions_.find(key);
  return found == partitions_.end() ? nullptr : &found->second;
}

bool StoredWeights::plan_store(Round& round) {
  forget(storing_);  // forgets those of a pass that has failed
  try {
    const std::vector<std::uint32_t>& ranks = round.group->group.ranks;
    storing_.ranks = ranks;
    if (shares_.take(ranks, round.first.length)) {
      storing_.counted = round.first.length;
      storing_.dtype = round.first.dtype;
      storing_.additions.assign(ranks.size(), 0);
      storing_.latest.assign(ranks.size(), 0);
      storing_.bytes.resize(round.first.length);
      sums_.plan().targets.push_back({.bytes = storing_.bytes.data()});
      return true;
    }
  } catch (const std::bad_alloc&) {
    forget(storing_);
  }
  ends_.fail(round, {ErrorCode::kInternal, "the server has no memory to keep these weights",
                     "use more servers, or unstore() weights that nobody adds to any more"});
  return false;
}

bool StoredWeights::store(Round& round) {
  try {
    StoredPartition& stored = partitions_[round.key];
    release_held(stored, Release::kAll);  // nobody waits for additions to the weights before
    std::swap(stored, storing_);
    forget(storing_);
    return true;
  } catch (const std::bad_alloc&) {
    ends_.fail(round, {ErrorCode::kInternal, "the server has no memory to keep these weights", "use more servers"});
    return false;
  }
}

void StoredWeights::forget(StoredPartition& stored) {
  if (stored.counted > 0) shares_.give_back(stored.ranks, stored.counted);
  stored = {};
}

void StoredWeights::give_back(Round& round) {
  StoredPartition* const stored = find(round.key);
  if (stored == nullptr) return ends_.fail(round, nothing_is_kept());
  if (!is_like(*stored, round)) return ends_.fail(round, is_not_alike());
  sums_.plan().sources.assign(1, {.bytes = stored->bytes.data()});
  if (!sums_.plan_targets(round) || !sums_.run(round, added_to(*stored))) return;
  release_held(*stored, Release::kAll);
  forget(*stored);
  partitions_.erase(round.key);
  answer(round);
}

void StoredWeights::accumulate(Round& round) {
  StoredPartition* const stored = find(stored_key(round));
  const std::size_t rank = stored == nullptr ? 0 : stored->index_of(round.group->group.ranks.front());
  if (stored == nullptr || rank == stored->ranks.size()) return ends_.fail(round, nothing_is_kept());
  if (!is_like(*stored, round)) return ends_.fail(round, is_not_alike());
  const auto [most_ahead, tries] = tensor::Addition::of(round.first.place);
  const std::uint64_t first_try = std::uint64_t{round.number - tries} + 1;
  const bool is_there = tries > 0 && stored->latest[rank] == first_try;
  SumPlan& plan = sums_.plan();
  plan.read_from(round);
  if (is_there) plan.sources.clear();
  plan.sources.insert(plan.sources.begin(), {.bytes = stored->bytes.data()});
  if (!sums_.plan_targets(round)) return;
  const std::uint64_t before = stored->additions[rank];
  const std::uint64_t count = is_there ? before : before + 1;
  stored->additions[rank] = count;
  const bool is_held = !may_go_on(*stored, count, most_ahead);
  if (is_held) plan.targets.clear();
  plan.targets.push_back({.bytes = stored->bytes.data()});
  if (!sums_.run(round, added_to(*stored))) {
    stored->additions[rank] = before;
    return;
  }
  stored->latest[rank] = first_try;
  if (is_held) {
    round.hold(count);
    stored->held.push_back(round.token());
  } else {
    answer(round);
  }
  if (!stored->held.empty()) release_held(*stored, Release::kThoseInTime);
}

bool StoredWeights::may_go_on(const StoredPartition& stored, std::uint64_t count, std::uint32_t most_ahead) const {
  return stored.may_go_on(count, most_ahead, [this](std::uint32_t rank) { return gone_.contains(rank); });
}

void StoredWeights::release_held() {
  for (auto& [key, stored] : partitions_) release_held(stored, Release::kThoseInTime);
}

void StoredWeights::release_held(StoredPartition& stored, Release which) {
  std::vector<std::uint32_t> held = std::exchange(stored.held, {});
  std::erase_if(held, [&](std::uint32_t token) {
    Round& round = table_.by_token(token);
    if (!round.is(RoundPhase::kHeld) || find(stored_key(round)) != &stored) return true;  // it was given up
    if (which == Release::kThoseInTime && !may_go_on(stored, round.held_at(), most_ahead_of(round))) return false;
    sums_.plan().sources.assign(1, {.bytes = stored.bytes.data()});
    // The round has had a slot since it was held, if it needs one.
    if (sums_.plan_targets(round) && sums_.run(round, added_to(stored))) answer(round);
    return true;
  });
  stored.held.insert(stored.held.end(), held.begin(), held.end());
}

std::vector<std::uint32_t> StoredWeights::ranks_behind(const Round& round) const {
  std::vector<std::uint32_t> ranks;
  const auto found = partitions_.find(stored_key(round));
  if (found == partitions_.end()) return ranks;
  const StoredPartition& stored = found->second;
  for (std::size_t i = 0; i < stored.ranks.size(); ++i) {
    const bool is_behind = stored.additions[i] + most_ahead_of(round) <= round.held_at();
    if (is_behind && !gone_.contains(stored.ranks[i])) ranks.push_back(stored.ranks[i]);
  }
  return ranks;
}

}  // namespace bps::server
