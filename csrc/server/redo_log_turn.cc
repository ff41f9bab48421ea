// SPDX-License-Identifier: Apache-2.0
#include "server/redo_log_turn.h"

#include <algorithm>
#include <utility>

#include "server/worker_session.h"

namespace bps::server {

bool RedoLogTurn::begin(Round& round, SumPlan& plan) {
  if (!has_readers(round)) return true;
  if (is_held()) {
    if (!std::exchange(round.is_queued, true)) line_.push_back(&round);
    return false;
  }
  readers_.clear();
  plan.log = log_;
  plan.key = {round.key.group, round.key.tensor, round.number, round.key.partition};
  return true;
}

void RedoLogTurn::hold(const Round& round) {
  if (has_readers(round)) holder_ = &round;
}

void RedoLogTurn::note_posted(WorkerSession& session) {
  is_kept_ |= session.is_lost();
  if (!session.answers().is_empty()) readers_.push_back(&session);
}

void RedoLogTurn::note_dropped(WorkerSession& session) {
  is_kept_ |= !session.answers().is_empty() && std::ranges::find(readers_, &session) != readers_.end();
}

void RedoLogTurn::end_line(std::vector<Round*>& free) {
  if (line_.empty() || is_held()) return;
  free.insert(free.end(), line_.begin(), line_.end());
  line_.clear();
}

bool RedoLogTurn::is_held() const {
  return is_kept_ || holder_ != nullptr ||
         std::ranges::any_of(readers_, [](WorkerSession* one) { return !one->answers().is_empty(); });
}

bool RedoLogTurn::has_readers(const Round& round) const {
  return log_ != nullptr && std::ranges::any_of(round.arrivals, &Arrival::is_logged);
}

}  // namespace bps::server
