// SPDX-License-Identifier: Apache-2.0
// The rare events of the round engine: memory, workers without slots, refusals and losses. The hot part is
// round_engine_data_path.cc.
#include "server/round_engine.h"

#include <algorithm>
#include <span>
#include <utility>

namespace bps::server {
namespace {

OpenRound::Waits waits_of(RoundPhase phase) {
  switch (phase) {
    case RoundPhase::kOpen: return OpenRound::Waits::kForPushes;
    case RoundPhase::kContributed:
    case RoundPhase::kHostProposed: return OpenRound::Waits::kForNetwork;
    case RoundPhase::kComplete:
    case RoundPhase::kProposed:
    case RoundPhase::kAnswered: return OpenRound::Waits::kForAnswers;
    case RoundPhase::kHeld:
    case RoundPhase::kFailed: break;
  }
  return OpenRound::Waits::kForMembers;
}

}  // namespace

// ---- Memory, and workers without slots

void RoundEngine::wait(Round& round) {
  if (!std::exchange(round.is_queued, true)) waiting_.push_back(&round);
}

// Whether everyone this round waits for is out of slots, so that none of them can push it.
bool RoundEngine::waits_for_starved(const Round& round) const {
  if (pool_.starved_windows == 0 || !round.is(RoundPhase::kOpen)) return false;
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    if (round.arrivals[i].has_pushed()) continue;
    WorkerSession* session = session_of(round, i);
    if (session == nullptr || !session->window().is_starved()) return false;
  }
  return true;
}

void RoundEngine::grant_overflow(const Round& round) {
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    if (round.arrivals[i].has_pushed()) continue;
    session_of(round, i)->window().grant_overflow();
    counters_.overflow_slots.add();
  }
}

// The rank that pushes for a contributor: of a host, its relay.
std::uint32_t RoundEngine::speaker_of(const RoundGroup& group, const RoundKey& key, std::uint32_t index) const {
  const van::Contributor& contributor = group.contributors(key.for_host)[index];
  if (!contributor.is_host()) return group.group.ranks[contributor.members.front()];
  return hosts_.relay(contributor.host, limits_.here.server_rank,
                      tensor::relay_hash(tensor::spread_of(key.tensor, key.partition)));
}

WorkerSession* RoundEngine::session_of(const Round& round, std::uint32_t index) const {
  return find_session(sessions_, speaker_of(round, index), round.peers.worker_loop);
}

// Slots for the result and for payloads that were posted in place.
void RoundEngine::reserve(const Round& round) {
  std::size_t slots = round.is(RoundPhase::kComplete) && !round.is_contribution() ? 1 : 0;
  for (const Arrival& arrival : round.arrivals) slots += arrival.awaits_acknowledgement() ? 1 : 0;
  if (slots > 0) pool_.reserve(round.first.length, slots);
}

bool RoundEngine::resume() {
  if (std::exchange(worker_ran_out_, false)) {
    for (Round* round : table_.open()) {
      if (waits_for_starved(*round)) wait(*round);
    }
  }
  if (!behind_log_.empty()) resume_behind_log();
  const bool found = !waiting_.empty();
  for (std::size_t i = 0; i < waiting_.size(); ++i) {
    Round& round = *waiting_[i];
    // A round that was closed meanwhile waits no more, even if its entry serves another one by now.
    if (!std::exchange(round.is_queued, false) || round.is(RoundPhase::kFailed)) continue;
    try {
      reserve(round);
      if (waits_for_starved(round)) grant_overflow(round);
    } catch (const Error& error) {
      if (round.is_with_servers()) continue;  // their answer acknowledges pushes, too
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
  if (round.is(RoundPhase::kComplete)) return complete(round);
  for (Arrival& arrival : round.arrivals) {
    if (!arrival.awaits_acknowledgement()) continue;
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

void RoundEngine::refuse_round(const Push& push, const RoundGroup& group, RoundTable::Found found) {
  const std::string* why = why_incomplete(group);
  if (found == RoundTable::Found::kTooMany) {
    reject(push.session);
  } else if (found == RoundTable::Found::kOver && why != nullptr) {  // see end_for_absent()
    refuse(push.session, push.header.immediate, failure_of(*why));
  } else if (found == RoundTable::Found::kOver && (push.header.flags & tensor::kIsPush) == 0) {
    refuse(push.session, push.header.immediate,
           {ErrorCode::kInvalidArgument, "a pull is for a round that is over, because its push was cancelled or failed",
            "push again before the pull"});
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
bool RoundEngine::refuse_gone(const Push& push, const RoundGroup& group) {
  const tensor::PushHeader& header = push.header;
  const bool for_host = (header.flags & tensor::kForHost) != 0;
  const RoundKey key{header.group, header.tensor, header.partition, for_host};
  const std::string* why = why_gone(group, key, nullptr, header.kind);
  if (why == nullptr) return false;
  if (table_.find(key, header.round) != nullptr) return false;
  const RoundFailure failure = failure_of(*why);
  // Of one that has left, nobody else knows that this host does not contribute. When a view ends, everybody is told.
  if (for_host && !group.ends_on_host && !view_ended_) tell_network(key, header.round, header.place, failure);
  refuse(push.session, header.immediate, failure);
  return true;
}

// A member comes to a round that has failed. The round is over when all of them have been told.
void RoundEngine::refuse_failed(Round& round, Arrival& arrival, const Push& push) {
  refuse(push.session, push.header.immediate, round.failure());
  round.end(arrival);
  close_if_over(round);
}

// A round whose sum is known, or with the servers, goes on for the others. It may be over, and closed, when this
// returns.
void RoundEngine::disagree(Round& round, Arrival& arrival, const Push& push) {
  const tensor::PushHeader& header = push.header;
  const WorkerSession& session = push.session;
  std::string others;
  for (const Arrival& one : round.arrivals) {
    if (one.session == nullptr || one.session == &session) continue;
    others = "rank " + std::to_string(one.session->worker_rank()) + " and ";
    break;
  }
  const bool by_settings = ((round.first.flags ^ header.flags) & tensor::kTwoPhase) != 0;
  const RoundFailure why{ErrorCode::kMismatch,
                         "ranks disagree in round " + std::to_string(round.number) + ": " + others + "rank " +
                             std::to_string(session.worker_rank()) +
                             (by_settings ? " have different settings of BPS_SERVER_FAILOVER or BPS_MIN_WORKERS"
                                          : " called different operations, or with different dtype, size or reduction"),
                         by_settings
                             ? "set both alike in all processes of the job"
                             : "call the same operation with the same arguments for a name on every rank of the group"};
  refuse(push.session, header.immediate, why);
  if (!arrival.awaits_answer()) round.end(arrival);
  if (round.is_with_servers()) return network_->cancel(round.token(), Error(why.code, why.what, why.hint));
  if (round.is_summed()) return close_if_over(round);
  if (round.is_contribution()) tell_network(round, why);
  fail(round, why);
}

// Tells everyone who waits for something. A member whose push was acknowledged learns of it when it pulls.
void RoundEngine::fail(Round& round, RoundFailure why, std::span<const std::uint32_t> missing) {
  round.fail(std::move(why));
  is_log_kept_ |= log_holder_ == &round;
  compressed_summer_.forget(round);
  const auto tell = [&](WorkerSession& session, std::uint32_t immediate, bool is_given_up) {
    // With the end of the view nobody knows what becomes of the contribution of a host.
    const bool is_known = round.failure().code != ErrorCode::kRoundAborted;
    if (!is_given_up || !is_known) return refuse(session, immediate, round.failure());
    tensor::Cancelled outcome;
    outcome.aborted = {immediate};
    outcome.missing = {missing.begin(), missing.end()};
    session.send(outcome);
  };
  for (Arrival& arrival : round.arrivals) {
    if (arrival.answer.is(AnswerStage::kLanding)) arrival.session->forget_landing(round);
    release(arrival.slot);
    arrival.span = {};
    const bool is_told = arrival.awaits_acknowledgement() || arrival.awaits_answer();
    if (arrival.awaits_acknowledgement()) {
      tell(*arrival.session, arrival.push_immediate, arrival.push.is(PushStage::kGivenUp));
      arrival.end_push();
    }
    if (arrival.awaits_answer()) {
      tell(*arrival.session, arrival.immediate, arrival.answer.is(AnswerStage::kGivenUp));
    }
    if (is_told) round.end(arrival);
  }
  round.counts.landing = 0;
  tell_relays(round);
  note_failure(round);
  end_for_absent(round);
  close_if_over(round);
}

void RoundEngine::note_failure(const Round& round) {
  const auto& [group, tensor, partition, for_host] = round.key;
  last_failure_ = "round " + std::to_string(round.number) + " of tensor " + std::to_string(tensor) + ", partition " +
                  std::to_string(partition) + ", group " + std::to_string(group) + ": " + round.failure().what;
  if (when_failed) when_failed();
}

// Ranks of other hosts may wait for others of their host to push.
void RoundEngine::tell_relays(const Round& round) {
  if (round.key.for_host || !round.contributors->has_hosts()) return;
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    if (!(*round.contributors)[i].is_host() || round.arrivals[i].has_pushed()) continue;
    if (WorkerSession* relay = session_of(round, i)) {
      relay->send(tensor::RoundFailed{round.key.group, round.key.tensor, round.key.partition, round.number,
                                      round.failure().code, round.failure().what, round.failure().hint});
    }
  }
}

// ---- Cancelled operations

// Which contributor the cancelling rank speaks for: itself, or its host.
std::uint32_t RoundEngine::contributor_of(const RoundGroup& group, std::uint32_t rank, bool for_host) const {
  const std::int32_t member = group.group.index_of(rank);
  const van::Contributors& contributors = group.contributors(for_host);
  if (member != van::kNoRank) return contributors.of_member(static_cast<std::uint32_t>(member));
  if (for_host || !contributors.has_hosts()) return van::Contributors::kNone;
  for (std::uint32_t i = 0; i < contributors.size(); ++i) {
    if (contributors[i].is_host() && contributors[i].host == hosts_.host_of(rank)) return i;
  }
  return van::Contributors::kNone;
}

tensor::Cancelled RoundEngine::cancel(WorkerSession& session, const tensor::Cancel& cancel) {
  tensor::Cancelled reply;
  const RoundGroup* const known = find_group(cancel.group, session.worker_rank());
  const std::uint32_t contributor =
      known == nullptr ? van::Contributors::kNone : contributor_of(*known, session.worker_rank(), cancel.for_host);
  if (contributor == van::Contributors::kNone) {
    counters_.stale.add();
    return reply;
  }
  const RoundGroup& group = *known;
  for (const tensor::CancelledPartition& one : cancel.partitions) {
    const RoundKey key{cancel.group, cancel.tensor, one.partition, cancel.for_host};
    Round* round = table_.find(key, cancel.round);
    // Once it is over, every member has been answered, or told of a failure.
    Outcome outcome = round == nullptr && table_.is_over(key, cancel.round) ? Outcome::kAnswered : Outcome::kAborted;
    // A group that lacks a member opens no rounds: a late push is refused without one.
    if (round == nullptr && outcome == Outcome::kAborted &&
        why_gone(group, key, nullptr, tensor::OperationKind::kSplit) == nullptr) {
      const auto [found, opened] = table_.find_or_open(key, cancel.round, group, session.share());
      if (found == RoundTable::Found::kTooMany) {
        reject(session);
        break;
      }
      round = opened;
      if (round != nullptr) {
        round->peers = {.worker_loop = session.worker_loop(), .onward_server = one.place};
      }
    }
    if (round != nullptr) outcome = this->cancel(*round, contributor, one.immediate, cancel, reply.missing);
    (outcome == Outcome::kPending    ? reply.pending
     : outcome == Outcome::kAnswered ? reply.answered
                                     : reply.aborted)
        .push_back(one.immediate);
  }
  return reply;
}

std::vector<std::uint32_t> RoundEngine::ranks_without_push(const Round& round, std::uint32_t except) const {
  if (round.is(RoundPhase::kHeld)) return ranks_behind(round);
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    if (round.arrivals[i].has_pushed() || i == except) continue;
    for (const std::uint32_t member : (*round.contributors)[i].members) {
      ranks.push_back(round.group->group.ranks[member]);
    }
  }
  std::ranges::sort(ranks);
  return ranks;
}

std::vector<OpenRound> RoundEngine::list_open(std::size_t most) const {
  constexpr std::uint32_t kNobody = ~std::uint32_t{0};
  std::vector<OpenRound> list;
  const std::span open(table_.open());
  const std::uint64_t now = coarse_now_ns();
  for (const Round* round : open.first(std::min(most, open.size()))) {
    OpenRound one;
    one.key = round->key;
    one.number = round->number;
    one.since_ms = static_cast<std::int64_t>((now - round->history.opened) / 1'000'000);
    one.missing = ranks_without_push(*round, kNobody);
    one.waits = waits_of(round->phase());
    list.push_back(std::move(one));
  }
  return list;
}

double RoundEngine::oldest_s() const {
  const auto& open = table_.open();
  if (open.empty()) return 0;
  const Round* oldest = *std::ranges::min_element(open, {}, [](const Round* round) { return round->history.opened; });
  return static_cast<double>(coarse_now_ns() - oldest->history.opened) * 1e-9;
}

// What becomes of the wait with this immediate. Once the sum is known it is answered, or will be; before, the round
// fails for everybody, even if the push is still to come. Where the host has contributed, the servers decide.
RoundEngine::Outcome RoundEngine::cancel(Round& round, std::uint32_t contributor, std::uint32_t immediate,
                                         const tensor::Cancel& cancel, std::vector<std::uint32_t>& missing) {
  Arrival& arrival = round.arrivals[contributor];
  const bool pulls = arrival.awaits_answer() && arrival.immediate == immediate;
  const bool pushes = arrival.awaits_acknowledgement() && arrival.push_immediate == immediate;
  switch (round.phase()) {
    case RoundPhase::kContributed:
    case RoundPhase::kHostProposed:
      if (pulls && !arrival.answer.is_between(AnswerStage::kLanding, AnswerStage::kLanded)) {
        arrival.answer.enter(AnswerStage::kGivenUp);
      }
      if (pushes) arrival.push.enter(PushStage::kGivenUp);
      if (!arrival.awaits_answer() && !arrival.awaits_acknowledgement()) round.end(arrival);
      network_->cancel(round.token(), Error(cancel.code, cancel.what, cancel.hint));
      return pulls || pushes ? Outcome::kPending : Outcome::kAborted;
    case RoundPhase::kProposed:
      if (pulls) return Outcome::kPending;
      counters_.stale.add();  // one message pushes and pulls, so nothing of this round has that immediate
      return Outcome::kAborted;
    case RoundPhase::kAnswered:
    case RoundPhase::kFailed: {
      const bool is_answered = arrival.answer.is(AnswerStage::kAnswered);
      round.end(arrival);
      close_if_over(round);
      return is_answered ? Outcome::kAnswered : Outcome::kAborted;
    }
    case RoundPhase::kOpen:
    case RoundPhase::kComplete:
    case RoundPhase::kHeld: break;
  }
  if (pushes) arrival.end_push();
  if (pulls || !arrival.awaits_answer()) round.end(arrival);
  fail_cancelled(round, contributor, cancel, missing);
  return Outcome::kAborted;
}

// `missing`: the ranks that this operation still waited for, as far as they are not known from another partition.
void RoundEngine::fail_cancelled(Round& round, std::uint32_t contributor, const tensor::Cancel& cancel,
                                 std::vector<std::uint32_t>& missing) {
  const std::vector<std::uint32_t> late = ranks_without_push(round, contributor);
  if (missing.empty()) missing = late;
  RoundFailure why{
      cancel.code,
      cancel.what +
          (late.empty() || cancel.code != ErrorCode::kTimeout ? "" : "; it still waited for " + van::name_ranks(late)),
      cancel.hint};
  if (round.is_contribution()) tell_network(round, why);
  fail(round, std::move(why));
}

// ---- Losses

// Whether a member that is gone keeps this round of the group, or a new one, from completing. One that has left as it
// should has perhaps contributed before by a push on its own; of a rank of another host only its relay knows that. Any
// other operation it has waited for, for which all hosts must have contributed, or given up.
bool RoundEngine::cannot_contribute(const RoundGroup& group, std::uint32_t rank, const Gone& gone, const RoundKey& key,
                                    const Round* round, tensor::OperationKind kind) const {
  const std::int32_t member = group.group.index_of(rank);
  const van::Contributors& contributors = group.contributors(key.for_host);
  if (gone.state == Gone::State::kLost) {
    if (member != van::kNoRank) return true;
    if (key.for_host || !contributors.has_hosts()) return false;
    return contributor_of(group, rank, false) != van::Contributors::kNone;  // it may be the relay of members
  }
  if (gone.state == Gone::State::kClosed && lacks_speaker(group, rank, key, round)) return true;
  const std::uint32_t index =
      member == van::kNoRank ? van::Contributors::kNone : contributors.of_member(static_cast<std::uint32_t>(member));
  if (index == van::Contributors::kNone && member != van::kNoRank && kind < tensor::OperationKind::kSplit) {
    return round == nullptr || !round->is_with_servers();
  }
  if (index == van::Contributors::kNone || (round != nullptr && round->arrivals[index].has_pushed())) return false;
  if (kind < tensor::OperationKind::kSplit) return true;
  return std::ranges::all_of(contributors[index].members,
                             [&](std::uint32_t one) { return gone_ranks_.contains(group.group.ranks[one]); });
}

// Whether a contribution must still come from this rank, in its own name or in that of its host, which cannot be
// reached any more; or has come, and its bytes are where they cannot be read.
bool RoundEngine::lacks_speaker(const RoundGroup& group, std::uint32_t rank, const RoundKey& key,
                                const Round* round) const {
  const std::uint32_t index = contributor_of(group, rank, key.for_host);
  if (index == van::Contributors::kNone || speaker_of(group, key, index) != rank) return false;
  if (round == nullptr || !round->arrivals[index].has_pushed())
    return group.contributors(key.for_host)[index].is_host();
  return !round->is_summed() && round->arrivals[index].has_payload() && round->arrivals[index].slot == nullptr;
}

// Why this round of the group, or a new one, cannot complete; nullptr if it can.
const std::string* RoundEngine::why_gone(const RoundGroup& group, const RoundKey& key, const Round* round,
                                         tensor::OperationKind kind) const {
  for (const auto& [rank, gone] : gone_ranks_) {
    if (cannot_contribute(group, rank, gone, key, round, kind)) return &gone.why;
  }
  return nullptr;
}

// The member of the group that is gone, if one is: the group has completed its last round, or the last but those whose
// contributions are here.
const std::string* RoundEngine::why_incomplete(const RoundGroup& group) const {
  const auto gone = std::ranges::find_if(
      gone_ranks_, [&](const auto& one) { return group.group.index_of(one.first) != van::kNoRank; });
  return gone == gone_ranks_.end() ? nullptr : &gone->second.why;
}

// A failed round stays for members that are still to come to it, and in such a group perhaps none ever comes. One that
// does is refused without a round.
void RoundEngine::end_for_absent(Round& round) {
  if (!round.is(RoundPhase::kFailed) || why_incomplete(*round.group) == nullptr) return;
  for (Arrival& arrival : round.arrivals) round.end(arrival);
}

// Whether nobody is left to be told. A relay that leaves as it should has waited for those it speaks for.
bool RoundEngine::is_gone(const Round& round, std::uint32_t index) const {
  const auto gone = gone_ranks_.find(speaker_of(round, index));
  return gone != gone_ranks_.end() &&
         (gone->second.state != Gone::State::kLeft || !(*round.contributors)[index].is_host());
}

// A member hears of the end of the view here before the scheduler tells it, perhaps.
RoundFailure RoundEngine::failure_of(const std::string& loss) const {
  return view_ended_.value_or(RoundFailure{ErrorCode::kPeerLost, loss, kRestartJob});
}

void RoundEngine::fail_lost() {
  for (std::size_t i = table_.open().size(); i-- > 0;) {
    Round& round = *table_.open()[i];
    const std::string* why = why_gone(*round.group, round.key, &round, round.first.kind);
    for (std::uint32_t index = 0; index < round.contributors->size(); ++index) {
      if (!is_gone(round, index)) continue;
      Arrival& arrival = round.arrivals[index];
      arrival.end_push();
      if (arrival.answer.is(AnswerStage::kLanding)) {
        why = &gone_ranks_.at(speaker_of(round, index)).why;
        if (round.is_with_servers()) continue;  // it may have said that it has the answer, although it is gone
        arrival.session->forget_landing(round);
      }
      round.end(arrival);
    }
    if (round.is_with_servers()) {
      if (why == nullptr) continue;
      const RoundFailure failure = failure_of(*why);
      network_->cancel(round.token(), {failure.code, failure.what, failure.hint});
    } else if (round.is(RoundPhase::kAnswered) || round.is(RoundPhase::kFailed) || why == nullptr) {
      end_for_absent(round);
      close_if_over(round);
    } else {
      const RoundFailure failure = failure_of(*why);
      if (round.is_contribution() && !view_ended_) tell_network(round, failure);
      fail(round, failure);
    }
  }
  for (auto& [key, stored] : stored_) go_on(stored, false);
}

}  // namespace bps::server
