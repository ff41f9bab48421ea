// SPDX-License-Identifier: Apache-2.0
#include "van/calls.h"

#include <algorithm>

#include "core/json.h"
#include "tensor/operation_names.h"

namespace bps::van {
namespace {

constexpr const char* kUseNamesAgain = "use names and groups again in every step, in place of new ones";
constexpr const char* kSeeItsLog = "look into the log of that process, then start the job again";

std::string name_group(std::uint32_t id) {
  return "group " + std::to_string(id);
}

}  // namespace

Calls::Calls(MemberTable& members, Registry::Options options, Send send, std::function<void()> on_step)
    : members_(members), registry_(std::move(options)), send_(std::move(send)), on_step_(std::move(on_step)) {}

void Calls::fail(const BarrierState::Caller& caller, ErrorCode code, const std::string& text, const std::string& hint) {
  const Member& member = members_.worker(caller.rank);
  if (member.fate != Member::Fate::kLost) send_(member.peer, Failed{caller.call, code, text, hint});
}

// Fails a call when more calls of its rank wait than the rank can have threads.
bool Calls::fail_if_too_many(std::size_t waiting, const BarrierState::Caller& caller, const std::string& what) {
  if (waiting < BarrierState::kMostWaiting) return false;
  fail(caller, ErrorCode::kInvalidArgument,
       what + ": " + std::to_string(waiting) + " calls of rank " + std::to_string(caller.rank) + " wait for it already",
       "wait for a call before you make so many more");
  return true;
}

// Forgets a group for which nobody waits any more.
Calls::NewGroups::iterator Calls::drop(NewGroups::iterator asked) {
  registry_.give_back(asked->second.first, Registry::bytes_of(asked->first.first, asked->first.second));
  return new_groups_.erase(asked);
}

// Fails a call when one of the ranks is gone. It names the one that went first: others may have gone because of that.
bool Calls::fail_if_gone(const Member& caller, std::uint32_t call, std::span<const std::uint32_t> ranks,
                         const std::string& what) {
  const Member* first = nullptr;
  for (const std::uint32_t rank : ranks) {
    const Member& member = members_.worker(rank);
    if (member.went != 0 && (first == nullptr || member.went < first->went)) first = &member;
  }
  if (first == nullptr) return false;
  fail({caller.rank(), call}, ErrorCode::kPeerLost, what + ": " + first->farewell, kSeeItsLog);
  return true;
}

std::string Calls::waiting() const {
  JsonList list;
  const auto add = [&](const std::string& what, const BarrierState& state) {
    if (state.empty()) return;
    JsonList here;
    JsonList missing;
    for (const std::uint32_t rank : state.ranks()) (state.waits(rank) ? here : missing).add(rank);
    list.add_raw(JsonObject().add("what", what).add_raw("ranks", here.end()).add_raw("missing", missing.end()).end());
  };
  for (const auto& [group, state] : barriers_by_group_) add("barrier of " + name_group(group), state);
  for (const auto& [key, state] : new_groups_) add("new_group('" + key.second + "')", state);
  for (const auto& [group, forming] : forming_) {
    JsonList unaware;
    for (const Member& member : members_.all()) {
      if (std::ranges::count(forming.unaware, member.peer) > 0) unaware.add(member.node->describe());
    }
    JsonObject one;
    one.add("what", "new_group() of " + name_group(group)).add_raw("ranks", "[]").add_raw("missing", "[]");
    list.add_raw(one.add_raw("servers", unaware.end()).end());
  }
  return list.end();
}

void Calls::declare(const Member& caller, const Declare& call) {
  const std::uint32_t rank = caller.rank();
  auto [ids, problem, is_too_much, conflicts] = registry_.declare(rank, call.tensors);
  for (const auto& conflict : conflicts) {
    for (const std::uint32_t other : conflict.ranks) {
      const Member& member = members_.worker(other);
      if (member.fate == Member::Fate::kHere) send_(member.peer, TensorFailed{conflict.tensor, conflict.text});
    }
  }
  if (is_too_much) return fail({rank, call.call}, ErrorCode::kInvalidArgument, problem, kUseNamesAgain);
  if (!problem.empty()) {
    return fail({rank, call.call}, ErrorCode::kMismatch, problem,
                "all ranks of a group must declare a name with the same shape and element type");
  }
  declared_ += ids.size();
  send_(caller.peer, Declared{call.call, std::move(ids)});
}

void Calls::late_round(const Member& caller, const LateRound& late) {
  const Group* group = registry_.group(late.group);
  if (group == nullptr || group->index_of(caller.rank()) == kNoRank) return;
  const auto found = late_rounds_.note(caller.rank(), late);
  if (!found) return;
  const auto& [round, one, other] = found->difference;
  const std::string text = tensor::different_operations(late.round, one, other);
  const RoundFailed failed{late.group, late.tensor, late.round, text};
  if (!found->is_new) return send_(caller.peer, failed);
  for (const std::uint32_t rank : group->ranks) {
    const Member& member = members_.worker(rank);
    if (member.fate == Member::Fate::kHere) send_(member.peer, failed);
  }
}

void Calls::barrier(const Member& caller, const Barrier& call) {
  const std::uint32_t rank = caller.rank();
  const Group* group = registry_.group(call.group);
  if (group == nullptr || group->index_of(rank) == kNoRank) {
    return fail({rank, call.call}, ErrorCode::kInvalidArgument,
                "rank " + std::to_string(rank) + " is not a member of " + name_group(call.group),
                "use a group that new_group() has returned on this rank");
  }
  if (fail_if_gone(caller, call.call, group->ranks, "barrier of " + name_group(group->id))) return;
  BarrierState& waiting = barriers_by_group_.try_emplace(group->id, group->ranks).first->second;
  if (fail_if_too_many(waiting.waiting(rank), {rank, call.call}, "barrier of " + name_group(group->id))) return;
  if (call.partition_bytes > 0) registry_.limit_partitions(call.partition_bytes);
  const auto released = waiting.arrive({rank, call.call});
  if (!released.empty()) ++barriers_;
  for (const auto& [other, number] : released) {
    send_(members_.worker(other).peer, Done{number, registry_.partition_limit(), call.group});
  }
  if (!released.empty() && call.ends_step && call.group == 0 && on_step_) on_step_();
}

void Calls::new_group(const Member& caller, const NewGroup& call) {
  const std::uint32_t rank = caller.rank();
  if (const std::string problem = registry_.check_group(call.ranks, rank); !problem.empty()) {
    return fail({rank, call.call}, ErrorCode::kInvalidArgument, problem, "pass the same ranks on each of them");
  }
  const std::string what = "group '" + call.name + "'";
  if (fail_if_gone(caller, call.call, call.ranks, what)) return;
  if (const Group* known = registry_.find_group(call.ranks, call.name)) {
    const auto forming = forming_.find(known->id);
    if (forming == forming_.end()) return send_(caller.peer, GroupReady{call.call, known->id});
    std::vector<BarrierState::Caller>& callers = forming->second.callers;
    const auto own = std::ranges::count(callers, rank, &BarrierState::Caller::rank);
    if (fail_if_too_many(static_cast<std::size_t>(own), {rank, call.call}, what)) return;
    callers.push_back({rank, call.call});
    return;
  }
  const GroupKey key(call.ranks, call.name);
  auto waiting = new_groups_.find(key);
  if (waiting == new_groups_.end()) {
    const std::string problem = registry_.keep(rank, Registry::bytes_of(call.ranks, call.name), what);
    if (!problem.empty()) return fail({rank, call.call}, ErrorCode::kInvalidArgument, problem, kUseNamesAgain);
    waiting = new_groups_.try_emplace(key, call.ranks).first;
    waiting->second.first = rank;
  }
  if (fail_if_too_many(waiting->second.waiting(rank), {rank, call.call}, what)) return;
  std::vector<BarrierState::Caller> all_here = waiting->second.arrive({rank, call.call});
  if (all_here.empty() && call.name != kPairName) return;
  // These are ranks that asked twice, and, of a pair, those that have asked so far.
  for (const auto& again : waiting->second.cancel_all()) all_here.push_back(again);
  new_groups_.erase(waiting);
  announce(registry_.add_group(call.ranks, call.name), std::move(all_here));
}

void Calls::announce(const Group& group, std::vector<BarrierState::Caller> callers) {
  Forming& forming = forming_[group.id];
  forming.callers = std::move(callers);
  for (const Member& member : members_.all()) {
    if (!member.node->sums() || member.fate == Member::Fate::kLost || !member.connected) continue;
    forming.unaware.push_back(member.peer);
    send_(member.peer, GroupInfo{group});
  }
  finish_if_known(group.id);
}

void Calls::group_ack(const Member& server, const GroupAck& ack) {
  const auto forming = forming_.find(ack.group);
  if (forming == forming_.end()) return;
  std::erase(forming->second.unaware, server.peer);
  finish_if_known(ack.group);
}

void Calls::finish_if_known(std::uint32_t group) {
  const auto forming = forming_.find(group);
  if (forming == forming_.end() || !forming->second.unaware.empty()) return;
  for (const auto& [rank, call] : forming->second.callers) {
    if (members_.worker(rank).connected) send_(members_.worker(rank).peer, GroupReady{call, group});
  }
  forming_.erase(forming);
}

void Calls::cancel(const Member& caller, const Cancel& call) {
  const std::string text = caller.is_worker() ? missing_for({caller.rank(), call.call}) : "";
  send_(caller.peer, Missing{call.call, text});
}

std::string Calls::missing_for(BarrierState::Caller caller) {
  for (auto& [group, waiting] : barriers_by_group_) {
    if (const auto missing = waiting.cancel(caller)) return name_ranks(*missing) + " did not come";
  }
  for (auto entry = new_groups_.begin(); entry != new_groups_.end(); ++entry) {
    const auto missing = entry->second.cancel(caller);
    if (!missing) continue;
    std::string text = name_ranks(*missing) + " did not ask for it";
    for (const auto& [key, waiting] : new_groups_) {
      if (key.second != entry->first.second || key.first == entry->first.first || waiting.empty()) continue;
      text += "; a group of the same name is asked for with " + name_ranks(key.first);
    }
    if (entry->second.empty()) drop(entry);
    return text;
  }
  for (auto& [group, forming] : forming_) {
    if (std::erase(forming.callers, caller) == 0) continue;
    std::string text;
    for (const Peer peer : forming.unaware) {
      text += (text.empty() ? "" : ", ") + members_.find(peer)->node->describe();
    }
    return text + " did not confirm it";
  }
  return "";
}

void Calls::gone(const Member& member) {
  const auto has = [&member](const std::vector<std::uint32_t>& ranks) {
    return member.is_worker() && std::ranges::binary_search(ranks, member.rank());
  };
  for (auto& [id, waiting] : barriers_by_group_) {
    if (!has(waiting.ranks())) continue;
    for (const auto& caller : waiting.cancel_all()) {
      fail(caller, ErrorCode::kPeerLost, "barrier of " + name_group(id) + ": " + member.farewell, kSeeItsLog);
    }
  }
  for (auto entry = new_groups_.begin(); entry != new_groups_.end();) {
    if (!has(entry->first.first)) {
      ++entry;
      continue;
    }
    for (const auto& caller : entry->second.cancel_all()) {
      fail(caller, ErrorCode::kPeerLost, "group '" + entry->first.second + "': " + member.farewell, kSeeItsLog);
    }
    entry = drop(entry);
  }
  // A server that has left sums for the others until it closes its connection, so it has to know their groups.
  if (member.fate == Member::Fate::kLost) disconnected(member);
}

void Calls::disconnected(const Member& member) {
  std::vector<std::uint32_t> forming;
  for (auto& [id, group] : forming_) {
    std::erase(group.unaware, member.peer);
    forming.push_back(id);
  }
  for (const std::uint32_t id : forming) finish_if_known(id);
}

}  // namespace bps::van
