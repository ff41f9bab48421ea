// SPDX-License-Identifier: Apache-2.0
// The scheduler is lost: a session looks for another one, goes on alone, or ends.
#include <algorithm>
#include <utility>

#include "core/log.h"
#include "van/scheduler_session.h"

namespace bps::van {

std::string SchedulerSession::describe_loss(const std::string& why) const {
  return "the scheduler at " + line_.where + " was lost: " + why;
}

// The connection to the scheduler has ended, or is silent.
void SchedulerSession::lose_scheduler(const std::string& why) {
  if (state_.is(SessionState::kRetired)) return line_.open.reset();
  const End end = end_.so_far();
  const bool may_follow = end == End::kNotYet || end == End::kViewEnded;
  if (options_.outlives_scheduler && options_.scheduler_patience_s > 0 && joined() && may_follow) return search(why);
  // A view that has ended leaves nothing to go on with.
  if (options_.outlives_scheduler && joined() && end == End::kNotYet) return go_on_alone(why);
  expel(why);
}

// Calls of the scheduler wait, and so do those who suspect a peer.
void SchedulerSession::search(const std::string& why) {
  line_.open.reset();
  line_.why_lost = why;
  state_.enter(SessionState::kSearching);
  const std::string text = describe_loss(why);
  end_.note_scheduler_lost(text + "; another one in its place is looked for");
  log_warning(text + "; sums of declared names go on, and everything else waits for a scheduler in its place, for " +
              in_seconds(to_duration(options_.scheduler_patience_s)) + " at most");
  search_ = std::make_unique<SchedulerSearch>(
      loop_, options_.scheduler_patience_s, options_.find,
      SchedulerSearch::Events{.on_found = [this](FoundScheduler&& found) { come_back(std::move(found)); },
                              .on_given_up = [this](const std::string&) { give_up_search(); }});
}

// The next view begins with other credentials; this one keeps its own.
void SchedulerSession::come_back(FoundScheduler&& scheduler) {
  search_.reset();
  state_.enter(SessionState::kJoined);
  end_.note_scheduler_lost("");
  connect(std::move(scheduler));
  line_.open->send(report_.make(self().id, membership(), calls_.requests()));
  if (report_.leaving()) line_.open->send(*report_.leaving());
  log_warning("found a scheduler at " + line_.where + " in the place of the lost one");
}

void SchedulerSession::give_up_search() {
  search_.reset();
  const std::string why =
      line_.why_lost + ", and there was no other one for " + in_seconds(to_duration(options_.scheduler_patience_s));
  if (end_.so_far() == End::kNotYet) return go_on_alone(why);
  expel(why);
}

// The members are known to each other, and what they have declared and grouped is known to them: sums go on. A
// connection to a member that breaks from here on, or broke before the scheduler said why, is the loss of that member.
void SchedulerSession::go_on_alone(const std::string& why) {
  line_.open.reset();
  line_.why_lost = describe_loss(why);
  state_.enter(SessionState::kAlone);
  end_.note_scheduler_lost(line_.why_lost);
  const std::string effect = line_.why_lost +
                             "; sums of declared names go on, but barriers, commits, new names, new groups and the " +
                             "loss of a member need the scheduler";
  log_warning(effect);
  calls_.break_all(Error(ErrorCode::kPeerLost, effect, "save a checkpoint and start the job again"));
  while (const auto node = peers_.any()) answer_suspicion(*node);
}

// Without a scheduler nobody else tells a server that the last worker has left.
void SchedulerSession::end_if_unused() {
  const bool is_used = !events_.is_in_use || events_.is_in_use();
  if (!state_.is(SessionState::kAlone) || self().worker_rank != kNoRank || is_used) return;
  finish(End::kSchedulerLost, line_.why_lost);
}

// The job goes on without this node, if at all. A node that has not joined may try again.
void SchedulerSession::expel(const std::string& why) {
  std::string text = describe_loss(why);
  // The process that hosts it may have left, perhaps because of an earlier loss.
  const std::string loss = end_.first_loss().why;
  const std::string& first = loss.empty() ? report_.last_left() : loss;
  if (!first.empty()) text = first + "; after that, " + text;
  line_.open.reset();
  if (!joined()) return calls_.break_all(scheduler_lost(text));
  state_.enter(SessionState::kExpelled);
  if (end_.so_far() == End::kNotYet) lose(0, text);
  while (const auto node = peers_.any()) lose(*node, text);
  finish(End::kSchedulerLost, text);
}

Error SchedulerSession::scheduler_lost(const std::string& why) {
  return {ErrorCode::kPeerLost, why, "look into the log of the scheduler, then start the job again"};
}

}  // namespace bps::van
