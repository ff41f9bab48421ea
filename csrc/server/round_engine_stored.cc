// SPDX-License-Identifier: Apache-2.0
// Rounds of partitions that this server keeps: see stored_partition.h.
#include <algorithm>
#include <new>
#include <utility>

#include "server/round_engine.h"

namespace bps::server {
namespace {

// What an addition is to: the sender names the group, which must have it among its ranks.
RoundKey stored_key(const Round& round) {
  return {static_cast<std::uint32_t>(round.first.priority), round.key.tensor, round.key.partition};
}

std::uint32_t most_ahead_of(const Round& round) {
  return tensor::Addition::of(round.first.place).most_ahead;
}

RoundFailure nothing_is_kept() {
  return {ErrorCode::kInvalidArgument, "the servers keep no weights of this name and group",
          "call store() with it first, on every rank"};
}

RoundFailure is_not_alike() {
  return {ErrorCode::kMismatch, "the servers keep weights of another dtype or size under this name",
          "pass arrays like the one that was stored"};
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
  const auto found = stored_.find(key);
  return found == stored_.end() ? nullptr : &found->second;
}

// What the server keeps becomes a part of the pass. False: there is no memory for it, and the round has failed.
bool RoundEngine::plan_kept(Round& round) {
  if (!tensor::is_feedback(round.first.kind)) {
    if (!make_stored(round)) return false;
    plan_.targets.push_back({.bytes = storing_.bytes.data()});
    return true;
  }
  try {
    std::vector<float>& kept = compressed_summer_.residual_of(round, round.first.length / sizeof(float));
    auto* const bytes = reinterpret_cast<std::byte*>(kept.data());
    if (round.first.kind == tensor::OperationKind::kReadFeedback) {
      plan_.sources.assign(1, {.bytes = bytes});
    } else {
      plan_.targets.push_back({.bytes = bytes});
    }
    return true;
  } catch (const std::bad_alloc&) {
    fail(round, {ErrorCode::kInternal, "the server has no memory for what it feeds back", "use more servers"});
    return false;
  }
}

// Room for the result of a round that everybody takes part in, which is one more target of the pass. What was kept
// before stays until that is complete. False: there is none, and the round has failed.
bool RoundEngine::make_stored(Round& round) {
  forget(storing_);  // of a pass that has failed
  try {
    const std::vector<std::uint32_t>& ranks = round.group->group.ranks;
    storing_.ranks = ranks;
    if (shares_.take(ranks, round.first.length)) {
      storing_.counted = round.first.length;
      storing_.dtype = round.first.dtype;
      storing_.additions.assign(ranks.size(), 0);
      storing_.latest.assign(ranks.size(), 0);
      storing_.bytes.resize(round.first.length);
      return true;
    }
  } catch (const std::bad_alloc&) {
    forget(storing_);
  }
  fail(round, {ErrorCode::kInternal, "the server has no memory to keep these weights",
               "use more servers, or unstore() weights that nobody adds to any more"});
  return false;
}

// From now on this is what the server keeps. False: the round has failed.
bool RoundEngine::keep_stored(Round& round) {
  try {
    StoredPartition& stored = stored_[round.key];
    go_on(stored, true);  // of the weights before, nobody waits for anybody any more
    std::swap(stored, storing_);
    forget(storing_);
    return true;
  } catch (const std::bad_alloc&) {
    fail(round, {ErrorCode::kInternal, "the server has no memory to keep these weights", "use more servers"});
    return false;
  }
}

void RoundEngine::forget(StoredPartition& stored) {
  if (stored.counted > 0) shares_.give_back(stored.ranks, stored.counted);
  stored = {};
}

// A round of kStore to which nobody has contributed: everybody gets what the server keeps, and it keeps it no more.
void RoundEngine::unstore(Round& round) {
  StoredPartition* const stored = find_stored(round.key);
  if (stored == nullptr) return fail(round, nothing_is_kept());
  if (stored->dtype != round.first.dtype || stored->bytes.size() != round.first.length) {
    return fail(round, is_not_alike());
  }
  plan_.sources.assign(1, {.bytes = stored->bytes.data()});
  if (plan_.write_to(round)) {
    if (!find_result_slot(round)) return wait(round);
    plan_.targets.push_back({.bytes = round.result->payload()});
  }
  WorkerSession* broken = nullptr;
  if (const Status status = summer_.sum({stored->dtype, ReduceOp::kSum, 1}, round.first.length, plan_, broken);
      status != Status::kOk) {
    return end_pass(round, status, broken);
  }
  go_on(*stored, true);
  forget(*stored);
  stored_.erase(round.key);
  answer_all(round, round.result == nullptr ? nullptr : round.result->payload());
}

// Adds what a rank has sent, and answers with what is there then, unless the rank is too far ahead.
void RoundEngine::accumulate(Round& round) {
  StoredPartition* const stored = find_stored(stored_key(round));
  const std::size_t place = stored == nullptr ? 0 : stored->place_of(round.group->group.ranks.front());
  if (stored == nullptr || place == stored->ranks.size()) {
    return fail(round, nothing_is_kept());
  }
  if (stored->dtype != round.first.dtype || stored->bytes.size() != round.first.length) {
    return fail(round, is_not_alike());
  }
  const auto [most_ahead, tries] = tensor::Addition::of(round.first.place);
  const std::uint64_t first_try = std::uint64_t{round.number - tries} + 1;
  const bool is_there = tries > 0 && stored->latest[place] == first_try;
  plan_.read_from(round);
  if (is_there) plan_.sources.clear();
  plan_.sources.insert(plan_.sources.begin(), {.bytes = stored->bytes.data()});
  const bool needs_slot = plan_.write_to(round);
  if (needs_slot && !find_result_slot(round)) return wait(round);
  const std::uint64_t before = stored->additions[place];
  const std::uint64_t count = is_there ? before : before + 1;
  const auto is_gone = [this](std::uint32_t rank) { return is_gone_rank(rank); };
  stored->additions[place] = count;
  const bool waits = !stored->may_go_on(count, most_ahead, is_gone);
  if (waits) plan_.targets.clear();
  if (!waits && needs_slot) plan_.targets.push_back({.bytes = round.result->payload()});
  plan_.targets.push_back({.bytes = stored->bytes.data()});
  WorkerSession* broken = nullptr;
  if (const Status status = summer_.sum({stored->dtype, ReduceOp::kSum, 1}, round.first.length, plan_, broken);
      status != Status::kOk) {
    stored->additions[place] = before;
    return end_pass(round, status, broken);
  }
  stored->latest[place] = first_try;
  if (waits) {
    round.hold(count);
    stored->waiting.push_back(round.token());
  } else {
    answer_all(round, round.result == nullptr ? nullptr : round.result->payload());
  }
  if (!stored->waiting.empty()) go_on(*stored, false);
}

// Answers the rounds that have waited long enough, or `whatever` they wait for.
void RoundEngine::go_on(StoredPartition& stored, bool whatever) {
  const auto is_gone = [this](std::uint32_t rank) { return is_gone_rank(rank); };
  std::vector<std::uint32_t> waiting = std::exchange(stored.waiting, {});
  std::erase_if(waiting, [&](std::uint32_t token) {
    Round& round = table_.by_token(token);
    if (!round.is(RoundPhase::kHeld) || find_stored(stored_key(round)) != &stored) return true;  // it was given up
    if (!whatever && !stored.may_go_on(round.held_at(), most_ahead_of(round), is_gone)) return false;
    plan_.sources.assign(1, {.bytes = stored.bytes.data()});
    if (plan_.write_to(round)) plan_.targets.push_back({.bytes = round.result->payload()});
    WorkerSession* broken = nullptr;
    if (const Status status = summer_.sum({stored.dtype, ReduceOp::kSum, 1}, round.first.length, plan_, broken);
        status != Status::kOk) {
      end_pass(round, status, broken);
    } else {
      answer_all(round, round.result == nullptr ? nullptr : round.result->payload());
    }
    return true;
  });
  stored.waiting.insert(stored.waiting.end(), waiting.begin(), waiting.end());
}

std::vector<std::uint32_t> RoundEngine::ranks_behind(const Round& round) const {
  std::vector<std::uint32_t> ranks;
  const auto found = stored_.find(stored_key(round));
  if (found == stored_.end()) return ranks;
  const StoredPartition& stored = found->second;
  for (std::size_t i = 0; i < stored.ranks.size(); ++i) {
    const bool is_behind = stored.additions[i] + most_ahead_of(round) <= round.held_at();
    if (is_behind && !is_gone_rank(stored.ranks[i])) ranks.push_back(stored.ranks[i]);
  }
  return ranks;
}

}  // namespace bps::server
