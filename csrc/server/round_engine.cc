// SPDX-License-Identifier: Apache-2.0
// Handles the rare events of the round engine: rounds that have waited, cancelled operations, and losses. The hot part
// is round_engine_data_path.cc.
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
    case RoundPhase::kGathered:
    case RoundPhase::kProposed:
    case RoundPhase::kAnswered: return OpenRound::Waits::kForAnswers;
    case RoundPhase::kHeld:
    case RoundPhase::kFailed: break;
  }
  return OpenRound::Waits::kForMembers;
}

}  // namespace

RoundEngine::RoundEngine(const Options& options, const van::Hosts& hosts, const Sessions& sessions, SlotPool& pool,
                         Counters& counters)
    : epoch_(options.epoch),
      pool_(pool),
      counters_(counters),
      groups_(hosts, options.here, sessions),
      gone_(groups_),
      table_(options.table),
      shares_(options.kept_bytes),
      compressed_(shares_),
      ends_({table_, pool, counters, groups_, gone_, log_, compressed_}),
      queue_(pool, groups_, counters),
      sums_(ends_, queue_, pool, compressed_, options.name),
      stored_(table_, ends_, sums_, shares_, gone_),
      relay_(table_, ends_, sums_, pool, counters),
      admission_({table_, groups_, gone_, ends_, relay_, compressed_, counters, options.largest_partition}) {}

void RoundEngine::reroute(const transport::DataEndpoint& closed,
                          const std::function<void(transport::DataEndpoint*& data, std::uint64_t& key)>& change) {
  for (Round* round : table_.open()) {
    for (Arrival& arrival : round->arrivals) {
      if (arrival.data == &closed) change(arrival.data, arrival.answer_key);
    }
  }
}

// ---- Rounds that have waited

bool RoundEngine::resume() {
  queue_.add_starved(table_.open());
  log_.end_line(queue_.rounds());
  const bool found = !queue_.rounds().empty();
  while (Round* const next = queue_.next()) {
    Round& round = *next;
    try {
      queue_.provide(round);
    } catch (const Error& error) {
      if (round.is_with_servers()) continue;  // the servers' answer acknowledges pushes, too
      ends_.fail(round, error);
      continue;
    }
    proceed(round);
  }
  return found;
}

void RoundEngine::proceed(Round& round) {
  // A pass over a gathered round reads the payloads where they are, and acknowledges them.
  if (round.is(RoundPhase::kGathered)) return complete(round);
  for (Arrival& arrival : round.arrivals) {
    if (!arrival.awaits_acknowledgement()) continue;
    if (keep(arrival) != Status::kOk) return arrival.session->lose("its memory cannot be read");
    RoundEnds::acknowledge(arrival);
  }
}

// ---- Cancelled operations

tensor::Cancelled RoundEngine::cancel(WorkerSession& session, const tensor::Cancel& cancel) {
  tensor::Cancelled reply;
  const RoundGroup* const known = groups_.find(cancel.group, session.client.worker_rank);
  const std::uint32_t contributor = known == nullptr
                                        ? van::Contributors::kNone
                                        : groups_.contributor_of(*known, session.client.worker_rank, cancel.for_host);
  if (contributor == van::Contributors::kNone) {
    counters_.stale.add();
    return reply;
  }
  const RoundGroup& group = *known;
  for (const tensor::CancelledPartition& one : cancel.partitions) {
    const RoundKey key{cancel.group, cancel.tensor, one.partition, cancel.for_host};
    Round* round = table_.find(key, cancel.round);
    // When a round is over, every member has been answered, or told of a failure.
    Outcome outcome = round == nullptr && table_.is_over(key, cancel.round) ? Outcome::kAnswered : Outcome::kAborted;
    // A group that lacks a member opens no rounds: a late push is refused without one.
    if (round == nullptr && outcome == Outcome::kAborted &&
        gone_.why_incomplete(group, key, nullptr, tensor::OperationKind::kSplit) == nullptr) {
      const auto [found, opened] = table_.find_or_open(key, cancel.round, group, session.share());
      if (found == RoundTable::Found::kTooMany) {
        admission_.reject(session);
        break;
      }
      round = opened;
      if (round != nullptr) {
        round->peers = {.worker_loop = session.client.worker_loop, .onward_server = one.place};
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

// Once the sum is known, the wait with this immediate has been answered, or will be. Before that, the round fails for
// everybody, even if the push is still to come. Once the host has contributed, the servers decide.
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
      relay_.cancel(round, {cancel.code, cancel.what, cancel.hint});
      return pulls || pushes ? Outcome::kPending : Outcome::kAborted;
    case RoundPhase::kProposed:
      if (pulls) return Outcome::kPending;
      counters_.stale.add();  // one message pushes and pulls, so nothing of this round has that immediate
      return Outcome::kAborted;
    case RoundPhase::kAnswered:
    case RoundPhase::kFailed: {
      const bool is_answered = arrival.answer.is(AnswerStage::kAnswered);
      round.end(arrival);
      ends_.close_if_over(round);
      return is_answered ? Outcome::kAnswered : Outcome::kAborted;
    }
    case RoundPhase::kOpen:
    case RoundPhase::kGathered:
    case RoundPhase::kHeld: break;
  }
  if (pushes) arrival.end_push();
  if (pulls || !arrival.awaits_answer()) round.end(arrival);
  fail_cancelled(round, contributor, cancel, missing);
  return Outcome::kAborted;
}

// `missing` gets the ranks for which this operation still waited, unless another partition has told them.
void RoundEngine::fail_cancelled(Round& round, std::uint32_t contributor, const tensor::Cancel& cancel,
                                 std::vector<std::uint32_t>& missing) {
  const std::vector<std::uint32_t> late = ranks_without_push(round, contributor);
  if (missing.empty()) missing = late;
  const Error why{
      cancel.code,
      cancel.what +
          (late.empty() || cancel.code != ErrorCode::kTimeout ? "" : "; it still waited for " + van::name_ranks(late)),
      cancel.hint};
  if (round.is_contribution()) relay_.decline(round, why);
  ends_.fail(round, why);
}

std::vector<std::uint32_t> RoundEngine::ranks_without_push(const Round& round, std::uint32_t except) const {
  if (round.is(RoundPhase::kHeld)) return stored_.ranks_behind(round);
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    if (round.arrivals[i].has_pushed() || i == except) continue;
    for (const std::uint32_t position : (*round.contributors)[i].positions) {
      ranks.push_back(round.group->group.ranks[position]);
    }
  }
  std::ranges::sort(ranks);
  return ranks;
}

// ---- Losses

void RoundEngine::fail_lost() {
  for (std::size_t i = table_.open().size(); i-- > 0;) {
    Round& round = *table_.open()[i];
    const std::string* why = gone_.why_incomplete(*round.group, round.key, &round, round.first.kind);
    for (std::uint32_t index = 0; index < round.contributors->size(); ++index) {
      const std::string* const why_gone = gone_.why_unreachable(round, index);
      if (why_gone == nullptr) continue;
      Arrival& arrival = round.arrivals[index];
      arrival.end_push();
      if (arrival.answer.is(AnswerStage::kLanding)) {
        why = why_gone;
        if (round.is_with_servers()) continue;  // it may have said that it has the answer, although it is gone
        arrival.session->answers().forget(round);
      }
      round.end(arrival);
    }
    if (why == nullptr) why = ask_relays(round);
    if (round.is_with_servers()) {
      if (why != nullptr) relay_.cancel(round, gone_.failure_of(round.key.tensor, *why));
    } else if (round.is(RoundPhase::kAnswered) || round.is(RoundPhase::kFailed) || why == nullptr) {
      ends_.end_for_absent(round);
      ends_.close_if_over(round);
    } else {
      const Error failure = gone_.failure_of(round.key.tensor, *why);
      if (round.is_contribution() && !gone_.has_view_ended()) relay_.decline(round, failure);
      ends_.fail(round, failure);
    }
  }
  stored_.release_held();
}

// Asks relays whether what ranks that have left have pushed is on its way. Returns why one cannot be asked, or nullptr.
const std::string* RoundEngine::ask_relays(Round& round) {
  const auto& [group, tensor, partition, for_host] = round.key;
  if (for_host || !round.is(RoundPhase::kOpen) || round.first.kind != tensor::OperationKind::kSplit) return nullptr;
  for (std::uint32_t index = 0; index < round.contributors->size(); ++index) {
    Arrival& arrival = round.arrivals[index];
    if (arrival.has_pushed() || arrival.is_asked_for) continue;
    const std::string* const why = gone_.why_host_left(*round.group, index);
    if (why == nullptr) continue;
    WorkerSession* const relay = groups_.session_of(round, index);
    if (relay == nullptr || gone_.has_view_ended()) return why;
    arrival.is_asked_for = true;
    const Error failure = gone_.failure_of(tensor, *why);
    relay->send(
        tensor::HostHasLeft{group, tensor, partition, round.number, failure.code(), failure.what(), failure.hint()});
  }
  return nullptr;
}

// ---- For people

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

}  // namespace bps::server
