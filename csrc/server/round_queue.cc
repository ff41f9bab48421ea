// SPDX-License-Identifier: Apache-2.0
#include "server/round_queue.h"

#include "server/worker_session.h"

namespace bps::server {

bool RoundQueue::is_starved(const Round& round) const {
  if (pool_.starved_windows == 0 || !round.is(RoundPhase::kOpen)) return false;
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    if (round.arrivals[i].has_pushed()) continue;
    WorkerSession* session = groups_.session_of(round, i);
    if (session == nullptr || !session->window().is_starved()) return false;
  }
  return true;
}

void RoundQueue::add_starved(const std::vector<Round*>& open) {
  if (!std::exchange(has_empty_window_, false)) return;
  for (Round* round : open) {
    if (is_starved(*round)) add(*round);
  }
}

Round* RoundQueue::next() {
  while (next_ < rounds_.size()) {
    Round& round = *rounds_[next_++];
    // A round that was closed meanwhile waits no more, even if its entry serves another one by now.
    if (std::exchange(round.is_queued, false) && !round.is(RoundPhase::kFailed)) return &round;
  }
  rounds_.clear();
  next_ = 0;
  return nullptr;
}

void RoundQueue::provide(const Round& round) {
  std::size_t slots = round.is(RoundPhase::kGathered) && !round.is_contribution() ? 1 : 0;
  for (const Arrival& arrival : round.arrivals) slots += arrival.awaits_acknowledgement() ? 1 : 0;
  if (slots > 0) pool_.reserve(round.first.length, slots);
  if (!is_starved(round)) return;
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    if (round.arrivals[i].has_pushed()) continue;
    groups_.session_of(round, i)->window().grant_overflow();
    counters_.overflow_slots.add();
  }
}

}  // namespace bps::server
