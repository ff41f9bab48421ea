// SPDX-License-Identifier: Apache-2.0
// Rounds in two phases (tensor::kTwoPhase), whose results the loss of this process cannot take from anyone; and the
// redo log, by which members that share memory with it need one phase only.
#include <algorithm>
#include <utility>

#include "server/round_engine.h"

namespace bps::server {

void RoundEngine::propose_all(Round& round, const std::byte* result) {
  for (Arrival& arrival : round.arrivals) {
    release(arrival.slot);
    if (arrival.awaits_answer()) propose(round, arrival, result);
  }
  if (round.counts.writes_in_flight == 0) release(round.result);
  if (counters_.trace != nullptr) trace(TraceStage::kReplied, round, 0);
  if (round.counts.landing == 0) return end_landing(round);
  if (has_logged(round)) log_holder_ = &round;
}

// In two phases a wait is over with commit(): who wants no bytes, or has them and would know it, gets nothing before.
// But the host of the rank whose bytes are the result has it from that rank: its other ranks get it when it hears of
// this.
void RoundEngine::propose(Round& round, Arrival& arrival, const std::byte* result) {
  const bool has_source = !arrival.wants_data() && arrival.has_payload() && tensor::copies(round.first.kind) &&
                          (*round.contributors)[static_cast<std::uint32_t>(&arrival - round.arrivals.data())].is_host();
  if ((!arrival.wants_data() && !has_source) || arrival.is_logged) return;
  arrival.answer.enter(AnswerStage::kLanding);
  ++round.counts.landing;
  arrival.session->expect_landing(round, arrival);
  post(round, arrival, result);
}

// Members have the answers with these immediates.
void RoundEngine::on_landed(WorkerSession& session, std::span<const std::uint32_t> immediates) {
  for (const std::uint32_t immediate : immediates) {
    const auto landed = session.take_landing(immediate);
    if (!landed) {
      counters_.stale.add();
      continue;
    }
    Round& round = *landed->round;
    round.arrivals[landed->contributor].answer.enter(AnswerStage::kLanded);
    if (--round.counts.landing == 0) end_landing(round);
  }
}

// Of what was summed for all hosts the server knows when all of them have it.
void RoundEngine::end_landing(Round& round) {
  if (round.is(RoundPhase::kHostProposed)) return network_->note_landed(round.token());
  commit(round);
}

// Everyone has the result: nothing that happens to this process from now on can take it from anyone.
void RoundEngine::commit(Round& round) {
  round.enter(RoundPhase::kAnswered);
  if (log_holder_ == &round) log_holder_ = nullptr;
  for (Arrival& arrival : round.arrivals) {
    if (!arrival.awaits_answer()) continue;
    if (arrival.answer.is(AnswerStage::kLanding)) arrival.session->forget_landing(round);  // too early, of a server
    if (arrival.is_logged) {
      answer(round, arrival, nullptr);
      is_log_kept_ |= arrival.session->is_lost();
      if (arrival.session->has_answers()) log_readers_.push_back(arrival.session);
      continue;
    }
    round.end_answered(arrival);
    arrival.session->commit(arrival.immediate);
  }
  close_if_over(round);
}

// ---- The redo log

void RoundEngine::note_logged(Arrival& arrival, const Push& push) const {
  if ((push.header.flags & tensor::kForHost) != 0) return;  // a place means another thing then
  arrival.is_logged = push.header.place == tensor::PushHeader::kLogged && push.slot == nullptr && redo_log_ != nullptr;
}

// Whether the round can be summed now; if not, it waits for the log.
bool RoundEngine::plan_log(Round& round) {
  if (!has_logged(round)) return true;
  if (is_log_held()) {
    if (!std::exchange(round.is_queued, true)) behind_log_.push_back(&round);
    return false;
  }
  log_readers_.clear();
  plan_.log = redo_log_;
  plan_.key = {round.key.group, round.key.tensor, round.number, round.key.partition};
  return true;
}

bool RoundEngine::has_logged(const Round& round) const {
  return redo_log_ != nullptr && std::ranges::any_of(round.arrivals, &Arrival::is_logged);
}

bool RoundEngine::is_log_held() const {
  return is_log_kept_ || log_holder_ != nullptr || std::ranges::any_of(log_readers_, &WorkerSession::has_answers);
}

void RoundEngine::drop_answers(const WorkerSession& session) {
  is_log_kept_ |= session.has_answers() && std::ranges::find(log_readers_, &session) != log_readers_.end();
}

void RoundEngine::resume_behind_log() {
  if (is_log_held()) return;
  waiting_.insert(waiting_.end(), behind_log_.begin(), behind_log_.end());
  behind_log_.clear();
}

}  // namespace bps::server
