// SPDX-License-Identifier: Apache-2.0
// Handles the loss of the scheduler: a session looks for another one, goes on alone, or ends.
#include <algorithm>
#include <utility>

#include "core/log.h"
#include "van/scheduler_session.h"

namespace bps::van {
namespace {

std::string describe_loss(const SchedulerLine& line, const std::string& why) {
  return "the scheduler at " + line.where() + " was lost: " + why;
}

constexpr const char* kSeeSchedulerLog = "look into the log of the scheduler, then start the job again";

Error scheduler_lost(const std::string& why) {
  return {ErrorCode::kPeerLost, why, kSeeSchedulerLog};
}

}  // namespace

// Is called when the connection to the scheduler has ended, or is silent.
void SchedulerSession::lose_scheduler(const std::string& why) {
  if (state_.is(SessionState::kRetired)) return line_.close();
  const End end = end_.so_far();
  const bool may_follow = end == End::kNotYet || end == End::kViewEnded;
  if (options_.outlives_scheduler && options_.scheduler_patience_s > 0 && joined() && may_follow) return search(why);
  // A view that has ended leaves nothing to go on with.
  if (options_.outlives_scheduler && joined() && end == End::kNotYet) return go_on_alone(why);
  expel(why);
}

// Looks for another scheduler. Calls of the scheduler wait meanwhile, and so do those who suspect a peer.
void SchedulerSession::search(const std::string& why) {
  line_.close();
  state_.enter(SessionState::kSearching);
  const std::string text = describe_loss(line_, why);
  end_.note_scheduler_lost(text + "; another one in its place is looked for");
  log_warning(text + "; sums of declared names go on, and everything else waits for a scheduler in its place, for " +
              in_seconds(to_duration(options_.scheduler_patience_s)) + " at most");
  search_ = std::make_unique<SchedulerSearch>(
      loop_, options_.scheduler_patience_s, options_.find,
      SchedulerSearch::Events{.on_found = [this](FoundScheduler&& found) { come_back(std::move(found)); },
                              .on_given_up = [this, why](const std::string&) { give_up_search(why); }});
}

// Goes back to a scheduler. The next view begins with other credentials; this one keeps its own.
void SchedulerSession::come_back(FoundScheduler&& scheduler) {
  search_.reset();
  state_.enter(SessionState::kJoined);
  end_.note_scheduler_lost("");
  line_.connect(std::move(scheduler));
  line_.send(report_.make(self().id, membership(), calls_.requests()));
  if (report_.leaving()) line_.send(*report_.leaving());
  log_warning("found a scheduler at " + line_.where() + " in the place of the lost one");
}

// `why` says how the scheduler was lost.
void SchedulerSession::give_up_search(std::string why) {
  search_.reset();
  why += ", and there was no other one for " + in_seconds(to_duration(options_.scheduler_patience_s));
  if (end_.so_far() == End::kNotYet) return go_on_alone(why);
  expel(why);
}

// Members know each other, and what they have declared and grouped, so sums go on. A connection to a member that breaks
// from here on, or broke before the scheduler said why, is the loss of that member.
void SchedulerSession::go_on_alone(const std::string& why) {
  line_.close();
  state_.enter(SessionState::kAlone);
  const std::string loss = describe_loss(line_, why);
  end_.note_scheduler_lost(loss);
  const std::string effect = loss +
                             "; sums of declared names go on, but barriers, commits, new names, new groups and the " +
                             "loss of a member need the scheduler";
  log_warning(effect);
  calls_.break_all(Error(ErrorCode::kPeerLost, effect, "save a checkpoint and start the job again"));
  while (const auto node = peers_.any()) answer_suspicion(*node);
}

// The job goes on without this node, if it does. A node that has not joined may try again: see Van::try_to_join().
void SchedulerSession::expel(const std::string& why) {
  std::string text = describe_loss(line_, why);
  // The process that hosts the scheduler may have left, perhaps because of an earlier loss.
  const std::string loss = end_.first_loss().why;
  const std::string& first = loss.empty() ? report_.last_left() : loss;
  if (!first.empty()) text = first + "; after that, " + text;
  line_.close();
  if (!joined()) return calls_.break_all(Error(ErrorCode::kUnreachable, text, kSeeSchedulerLog));
  state_.enter(SessionState::kExpelled);
  if (end_.so_far() == End::kNotYet) lose(0, text);
  while (const auto node = peers_.any()) lose(*node, text);
  finish(End::kSchedulerLost, text);
}

void SchedulerSession::finish(End how, const std::string& why) {
  end_.set(how, why);
  if (how == End::kSchedulerLost) calls_.break_all(scheduler_lost(why));
}

}  // namespace bps::van
