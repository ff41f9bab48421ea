// SPDX-License-Identifier: Apache-2.0
// The rare events of the round engine: memory, workers without slots, refusals and losses. The hot part is
// round_engine_data_path.cc.
#include "server/round_engine.h"

#include <utility>

namespace bps::server {
namespace {

constexpr const char* kRestart = "restart the job from its last checkpoint";

// All loops that talk to this one have the same index.
std::uint16_t worker_loop_of(const Round& round) {
  for (const Arrival& arrival : round.arrivals) {
    if (arrival.session != nullptr) return arrival.session->worker_loop();
  }
  return 0;
}

}  // namespace

// ---- Memory, and workers without slots

void RoundEngine::wait(Round& round) {
  if (!std::exchange(round.waits, true)) waiting_.push_back(&round);
}

// Whether everyone this round waits for is out of slots, so that none of them can push it.
bool RoundEngine::waits_for_starved(const Round& round) const {
  if (round.has_all_pushes() || round.failure) return false;
  const std::uint16_t worker_loop = worker_loop_of(round);
  for (std::uint32_t i = 0; i < round.group->size(); ++i) {
    if (round.arrivals[i].pushed) continue;
    WorkerSession* session = find_session(sessions_, round.group->ranks[i], worker_loop);
    if (session == nullptr || !session->window().is_starved()) return false;
  }
  return true;
}

void RoundEngine::grant_overflow(const Round& round) {
  const std::uint16_t worker_loop = worker_loop_of(round);
  for (std::uint32_t i = 0; i < round.group->size(); ++i) {
    if (round.arrivals[i].pushed) continue;
    find_session(sessions_, round.group->ranks[i], worker_loop)->window().grant_overflow();
    counters_.overflow_slots.add();
  }
}

// Slots for the result and for payloads that were posted in place.
void RoundEngine::reserve(const Round& round) {
  std::size_t slots = round.has_all_pushes() && !round.summed ? 1 : 0;
  for (const Arrival& arrival : round.arrivals) slots += arrival.unacknowledged ? 1 : 0;
  if (slots > 0) pool_.reserve(round.first.length, slots);
}

bool RoundEngine::resume() {
  if (std::exchange(worker_ran_out_, false)) {
    for (Round* round : table_.open()) {
      if (waits_for_starved(*round)) wait(*round);
    }
  }
  const bool found = !waiting_.empty();
  for (std::size_t i = 0; i < waiting_.size(); ++i) {
    Round& round = *waiting_[i];
    // A round that was closed meanwhile waits no more, even if its entry serves another one by now.
    if (!std::exchange(round.waits, false) || round.failure) continue;
    try {
      reserve(round);
      if (waits_for_starved(round)) grant_overflow(round);
    } catch (const Error& error) {
      fail(round, {error.code(), error.what(), error.hint()});
      continue;
    }
    proceed(round);
  }
  waiting_.clear();
  return found;
}

void RoundEngine::proceed(Round& round) {
  // A pass over a complete round reads the payloads where they are, and acknowledges them.
  if (round.has_all_pushes() && !round.summed) return sum(round);
  for (Arrival& arrival : round.arrivals) {
    if (!arrival.unacknowledged) continue;
    if (keep(arrival) != Status::kOk) return arrival.session->lose("its memory cannot be read");
    acknowledge(arrival);
  }
}

// ---- Refusals

void RoundEngine::refuse(WorkerSession& session, std::uint32_t immediate, const RoundFailure& why) {
  counters_.stale.add();
  session.send(tensor::PushFailed{immediate, why.code, why.what, why.hint});
}

void RoundEngine::reject(WorkerSession& session) {
  counters_.excess.add();
  session.lose("it has begun more rounds than a worker can wait for");
}

void RoundEngine::refuse_round(const Push& push, RoundTable::Found found) {
  if (found == RoundTable::Found::kTooMany) {
    reject(push.session);
  } else if (found == RoundTable::Found::kOver) {
    refuse(push.session, push.header.immediate,
           {ErrorCode::kInternal, "a push came twice, or for a round that is over", "report this as a bug"});
  } else {
    refuse(push.session, push.header.immediate,
           {ErrorCode::kInvalidArgument, "a push is more than 65536 rounds ahead of the other ranks",
            "wait for earlier rounds of a name before you start so many more"});
  }
}

// Whether the push would open a round of a group that lacks a member.
bool RoundEngine::refuse_gone(const Push& push, const van::Group& group) {
  const std::string* why = why_gone(group, nullptr);
  if (why == nullptr) return false;
  const tensor::PushHeader& header = push.header;
  if (table_.find({header.group, header.tensor, header.partition}, header.round) != nullptr) return false;
  refuse(push.session, header.immediate, {ErrorCode::kPeerLost, *why, kRestart});
  return true;
}

// A member comes to a round that has failed. The round is over when all of them have been told.
void RoundEngine::refuse_failed(Round& round, Arrival& arrival, const Push& push) {
  refuse(push.session, push.header.immediate, *round.failure);
  if (std::exchange(arrival.done, true)) return;
  ++round.done;
  close_if_over(round);
}

void RoundEngine::disagree(Round& round, const WorkerSession& session) {
  std::string others;
  for (const Arrival& arrival : round.arrivals) {
    if (arrival.session == nullptr || arrival.session == &session) continue;
    others = "rank " + std::to_string(arrival.session->worker_rank()) + " and ";
    break;
  }
  fail(round, {ErrorCode::kMismatch,
               "ranks disagree in round " + std::to_string(round.number) + ": " + others + "rank " +
                   std::to_string(session.worker_rank()) +
                   " called different operations, or with different dtype, size or reduction",
               "call the same operation with the same arguments for a name on every rank of the group"});
}

// Tells everyone who waits for something. A member whose push was acknowledged learns of it when it pulls.
void RoundEngine::fail(Round& round, RoundFailure why) {
  round.failure = std::move(why);
  for (Arrival& arrival : round.arrivals) {
    release(arrival.slot);
    arrival.span = {};
    const bool pushes = std::exchange(arrival.unacknowledged, false);
    const bool pulls = std::exchange(arrival.pull_waiting, false);
    if (pushes) refuse(*arrival.session, arrival.push_immediate, *round.failure);
    if (pulls) refuse(*arrival.session, arrival.header.immediate, *round.failure);
    if ((pushes || pulls) && !std::exchange(arrival.done, true)) ++round.done;
  }
  close_if_over(round);
}

// ---- Cancelled operations

tensor::Cancelled RoundEngine::cancel(WorkerSession& session, const tensor::Cancel& cancel) {
  tensor::Cancelled reply;
  const auto known = groups_.find(cancel.group);
  const std::int32_t member = known == groups_.end() ? van::kNoRank : known->second.index_of(session.worker_rank());
  if (member == van::kNoRank) {
    counters_.stale.add();
    return reply;
  }
  const van::Group& group = known->second;
  for (const tensor::CancelledPartition& one : cancel.partitions) {
    const RoundKey key{cancel.group, cancel.tensor, one.partition};
    Round* round = table_.find(key, cancel.round);
    // Once it is over, every member has been answered, or told of a failure.
    bool answered = round == nullptr && table_.is_over(key, cancel.round);
    // A group that lacks a member opens no rounds: a late push is refused without one.
    if (round == nullptr && !answered && why_gone(group, nullptr) == nullptr) {
      const auto [found, opened] = table_.find_or_open(key, cancel.round, group, session.share());
      if (found == RoundTable::Found::kTooMany) {
        reject(session);
        break;
      }
      round = opened;
    }
    if (round != nullptr) {
      answered = this->cancel(*round, static_cast<std::uint32_t>(member), one.immediate, cancel, reply.missing);
    }
    (answered ? reply.answered : reply.aborted).push_back(one.immediate);
  }
  return reply;
}

// Whether the member's answer has been posted. If not, it will not be, even if the member's push is still to come. A
// push or pull of the member that waits beside the cancelled one fails like those of the others.
bool RoundEngine::cancel(Round& round, std::uint32_t member, std::uint32_t immediate, const tensor::Cancel& cancel,
                         std::vector<std::uint32_t>& missing) {
  Arrival& arrival = round.arrivals[member];
  const bool answered = arrival.answered;
  if (!std::exchange(arrival.done, true)) ++round.done;
  if (arrival.pull_waiting && arrival.header.immediate == immediate) arrival.pull_waiting = false;
  if (arrival.unacknowledged && arrival.push_immediate == immediate) arrival.unacknowledged = false;
  if (round.summed || round.failure) {
    close_if_over(round);
    return answered;
  }
  std::vector<std::uint32_t> late;
  for (std::uint32_t i = 0; i < round.group->size(); ++i) {
    if (!round.arrivals[i].pushed && i != member) late.push_back(round.group->ranks[i]);
  }
  if (missing.empty()) missing = late;
  fail(round, {cancel.code,
               cancel.what + (late.empty() || cancel.code != ErrorCode::kTimeout
                                  ? ""
                                  : "; it still waited for " + van::name_ranks(late)),
               cancel.hint});
  return false;
}

// ---- Losses

// Why this round of the group, or a new one, cannot complete; nullptr if it can.
const std::string* RoundEngine::why_gone(const van::Group& group, const Round* round) const {
  for (const auto& [rank, gone] : gone_ranks_) {
    const std::int32_t member = group.index_of(rank);
    if (member == van::kNoRank) continue;
    const bool has_pushed = round != nullptr && round->arrivals[static_cast<std::uint32_t>(member)].pushed;
    if (gone.lost || !has_pushed) return &gone.why;
  }
  return nullptr;
}

void RoundEngine::fail_lost() {
  for (std::size_t i = table_.open().size(); i-- > 0;) {
    Round& round = *table_.open()[i];
    const std::string* why = why_gone(*round.group, &round);
    for (const auto& [rank, gone] : gone_ranks_) {  // nobody is left to be told
      const std::int32_t member = round.group->index_of(rank);
      if (member == van::kNoRank) continue;
      Arrival& arrival = round.arrivals[static_cast<std::uint32_t>(member)];
      arrival.pull_waiting = arrival.unacknowledged = false;
      if (!std::exchange(arrival.done, true)) ++round.done;
    }
    if (round.summed || round.failure || why == nullptr) {
      close_if_over(round);
    } else {
      fail(round, {ErrorCode::kPeerLost, *why, kRestart});
    }
  }
}

}  // namespace bps::server
