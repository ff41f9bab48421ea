// SPDX-License-Identifier: Apache-2.0
// Runs rounds in two phases, and ends rounds that fail.
#include "server/round_ends.h"

#include "server/worker_session.h"

namespace bps::server {

// ---- Two phases

void RoundEnds::propose_host(Round& round, const std::byte* result) {
  enter_summed(round, RoundPhase::kHostProposed);
  propose_all(round, result);
}

void RoundEnds::propose_all(Round& round, const std::byte* result) {
  for (Arrival& arrival : round.arrivals) {
    release(arrival.slot);
    if (arrival.awaits_answer()) propose(round, arrival, result);
  }
  if (round.counts.writes_in_flight == 0) release(round.result);
  if (parts_.counters.trace != nullptr) trace(TraceStage::kReplied, round, 0);
  if (round.counts.landing == 0) return end_landing(round);
  parts_.log.hold(round);
}

// A member that wants no bytes, or reads the redo log, gets nothing before commit(). But a host whose rank has sent the
// bytes that everybody gets has the result from it, and gives it to its other ranks when it hears of this answer.
void RoundEnds::propose(Round& round, Arrival& arrival, const std::byte* result) {
  const bool has_source = !arrival.wants_data() && arrival.has_payload() && tensor::copies(round.first.kind) &&
                          (*round.contributors)[static_cast<std::uint32_t>(&arrival - round.arrivals.data())].is_host();
  if ((!arrival.wants_data() && !has_source) || arrival.is_logged) return;
  arrival.answer.enter(AnswerStage::kLanding);
  ++round.counts.landing;
  arrival.session->answers().expect(round, arrival);
  post(round, arrival, result);
}

void RoundEnds::on_landed(WorkerSession& session, std::span<const std::uint32_t> immediates) {
  for (const std::uint32_t immediate : immediates) {
    const auto landed = session.answers().take_landed(immediate);
    if (!landed) {
      parts_.counters.stale.add();
      continue;
    }
    Round& round = *landed->round;
    round.arrivals[landed->contributor].answer.enter(AnswerStage::kLanded);
    if (--round.counts.landing == 0) end_landing(round);
  }
}

// Is called when the ranks of a host have the result. The servers know when the other hosts have it.
void RoundEnds::end_landing(Round& round) {
  if (round.is(RoundPhase::kHostProposed)) return network_->note_landed(round.token());
  commit(round);
}

void RoundEnds::commit(Round& round) {
  round.enter(RoundPhase::kAnswered);
  parts_.log.commit(round);
  for (Arrival& arrival : round.arrivals) {
    if (!arrival.awaits_answer()) continue;
    if (arrival.answer.is(AnswerStage::kLanding)) arrival.session->answers().forget(round);  // the server was early
    if (arrival.is_logged) {
      answer(round, arrival, nullptr);
      parts_.log.note_posted(*arrival.session);
      continue;
    }
    round.end_answered(arrival);
    arrival.session->answers().commit(arrival.immediate);
  }
  close_if_over(round);
}

// ---- Failures

void RoundEnds::fail(Round& round, const Error& why, std::span<const std::uint32_t> missing) {
  round.fail(why);
  parts_.log.note_failed(round);
  parts_.compressed.forget(round);
  const auto tell = [&](WorkerSession& session, std::uint32_t immediate, bool is_given_up) {
    // When the view ends nobody knows what becomes of the contribution of a host.
    const bool is_known = round.failure().code() != ErrorCode::kRoundAborted;
    if (!is_given_up || !is_known) return refuse(session, immediate, round.failure());
    tensor::Cancelled outcome;
    outcome.aborted = {immediate};
    outcome.missing = {missing.begin(), missing.end()};
    session.send(outcome);
  };
  for (Arrival& arrival : round.arrivals) {
    if (arrival.answer.is(AnswerStage::kLanding)) arrival.session->answers().forget(round);
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

void RoundEnds::refuse(WorkerSession& session, std::uint32_t immediate, const Error& why) {
  parts_.counters.stale.add();
  session.send(tensor::PushFailed{immediate, why.code(), why.what(), why.hint()});
}

void RoundEnds::end_for_absent(Round& round) {
  if (!round.is(RoundPhase::kFailed) || parts_.gone.why_ended(*round.group) == nullptr) return;
  for (Arrival& arrival : round.arrivals) round.end(arrival);
}

void RoundEnds::note_failure(const Round& round) {
  const auto& [group, tensor, partition, for_host] = round.key;
  last_failure_ = "round " + std::to_string(round.number) + " of tensor " + std::to_string(tensor) + ", partition " +
                  std::to_string(partition) + ", group " + std::to_string(group) + ": " + round.failure().what();
  if (when_failed) when_failed();
}

// Tells relays that the round has failed: ranks of other hosts may wait there for others of their host to push.
void RoundEnds::tell_relays(const Round& round) {
  if (round.key.for_host || !round.contributors->has_hosts()) return;
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    if (!(*round.contributors)[i].is_host() || round.arrivals[i].has_pushed()) continue;
    if (WorkerSession* relay = parts_.groups.session_of(round, i)) {
      relay->send(tensor::RoundFailed{round.key.group, round.key.tensor, round.key.partition, round.number,
                                      round.failure().code(), round.failure().what(), round.failure().hint()});
    }
  }
}

}  // namespace bps::server
