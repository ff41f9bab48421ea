// SPDX-License-Identifier: Apache-2.0
// Rounds in two phases (tensor::kTwoPhase), whose results the loss of this process cannot take from anyone.
#include <algorithm>
#include <utility>

#include "server/round_engine.h"

namespace bps::server {

void RoundEngine::propose_all(Round& round, const std::byte* result) {
  for (Arrival& arrival : round.arrivals) {
    release(arrival.slot);
    if (arrival.pull_waiting) propose(round, arrival, result);
  }
  if (round.writes_in_flight == 0) release(round.result);
  if (counters_.trace != nullptr) trace(TraceStage::kReplied, round, 0);
  if (round.landing == 0) return end_landing(round);
}

// In two phases a wait is over with commit(): who wants no bytes, or has them and would know it, gets nothing before.
// But the host of the rank whose bytes are the result has it from that rank: its other ranks get it when it hears of
// this.
void RoundEngine::propose(Round& round, Arrival& arrival, const std::byte* result) {
  const bool has_source = !arrival.wants_data && arrival.has_payload && tensor::copies(round.first.kind) &&
                          (*round.contributors)[static_cast<std::uint32_t>(&arrival - round.arrivals.data())].is_host();
  if (!arrival.wants_data && !has_source) return;
  arrival.landing = true;
  ++round.landing;
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
    round.arrivals[landed->contributor].landing = false;
    if (--round.landing == 0) end_landing(round);
  }
}

// Of what was summed for all hosts the server knows when all of them have it.
void RoundEngine::end_landing(Round& round) {
  if (round.awaits_network) return network_->note_landed(static_cast<std::uint32_t>(round.number_in_table));
  commit(round);
}

// Everyone has the result: nothing that happens to this process from now on can take it from anyone.
void RoundEngine::commit(Round& round) {
  for (Arrival& arrival : round.arrivals) {
    if (!arrival.pull_waiting) continue;
    arrival.pull_waiting = false;
    arrival.answered = true;
    round.finish(arrival);
    arrival.session->commit(arrival.immediate);
  }
  close_if_over(round);
}

}  // namespace bps::server
