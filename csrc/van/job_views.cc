// SPDX-License-Identifier: Apache-2.0
// How one view follows another: after a loss, in the place of a lost scheduler, and with those who enter.
#include <algorithm>

#include "van/job.h"

namespace bps::van {

// ---- From one view to the next

// True when those who are here can be a view.
bool Job::goes_on() const {
  if (options_.terms.min_workers == 0 || !members_) return false;
  std::uint32_t workers = 0;
  bool any_server = false;
  for (const Member& member : members_->members()) {
    if (member.fate != Member::Fate::kHere) continue;
    if (member.is_worker()) ++workers;
    any_server |= member.node->server_rank >= 0;
  }
  return workers >= options_.terms.min_workers && any_server;
}

void Job::end_view(const std::string& why) {
  tell_departed();
  phase_.begin(Renewing{.why = why});
  suspicions_.clear();
  ++epoch_;
  std::vector<std::uint32_t> left;
  for (const Member& member : members_->members()) {
    if (member.fate == Member::Fate::kHere && member.is_worker()) left.push_back(member.rank());
  }
  const auto is_worker = [](const auto& one) { return one.second.worker_rank != kNoRank; };
  const std::size_t workers = left.size() + static_cast<std::size_t>(std::ranges::count_if(entering_, is_worker));
  tell_here(ViewEnded{epoch_, why + "; view " + std::to_string(epoch_ - 1) + " of " +
                                  std::to_string(members_->membership().workers) + " workers has ended, view " +
                                  std::to_string(epoch_) + " begins with " + std::to_string(workers) +
                                  ", among them the former " + name_ranks(left)});
  // Who has left waits for the others, which may need its server. In the next view nobody does.
  for (const Member& member : members_->members()) {
    const bool has_done_its_part = member.fate == Member::Fate::kLeft && member.cause.empty();
    if (has_done_its_part && member.connected) events_.send(member.peer, AllLeft{true});
  }
}

// ---- In the place of a lost scheduler

bool Job::rejoin(Peer peer, const Rejoin& report) {
  if (phase_.is<Over>() || knows(peer)) return false;
  const bool may_come = phase_.is<Gathering>() || phase_.is<Reuniting>();
  if (!may_come || options_.terms.min_workers == 0) {
    // A process that is in this view was something else in an earlier one, which needs no answer.
    const Member* known = members_ ? members_->by_identity(report.self().identity) : nullptr;
    if (known != nullptr && known->connected && members_->membership().epoch > report.membership.epoch) return true;
    refuse(peer, {ErrorCode::kPeerLost, "the job goes on without this process", "it came back too late"});
    return true;
  }
  auto* reuniting = phase_.in<Reuniting>();
  Reunion first(options_.run);
  if (const auto refused = (reuniting != nullptr ? reuniting->reunion : first).add(peer, report)) {
    refuse(peer, *refused);
    return true;
  }
  if (reuniting == nullptr) begin_reunion(std::move(first));
  if (phase_.in<Reuniting>()->reunion.complete()) reunite();
  return true;
}

// New processes that have come already do not know of which view they will be; they try again.
void Job::begin_reunion(Reunion&& reunion) {
  phase_.begin(Reuniting{.reunion = std::move(reunion), .until = Clock::now() + options_.reunion_patience});
  for (const Peer peer : patience_.end_all()) {
    if (events_.close) events_.close(peer);
  }
}

// The view that was lost with its scheduler is known, as far as it can be; it ends.
void Job::reunite() {
  const Reunion reunion = std::move(phase_.in<Reuniting>()->reunion);
  if (reunion.empty()) {  // all are gone again
    return phase_.begin(
        Gathering{.rendezvous = {options_.registry.workers, options_.registry.servers, options_.terms}});
  }
  members_ = std::make_unique<MemberTable>(reunion.seating());
  epoch_ = members_->membership().epoch;
  std::vector<Member*> lost;
  for (Member& member : members_->members()) {
    if (member.peer != 0) continue;
    member.connected = false;
    if (reunion.has_left(member.node->id)) {
      members_->note_gone(member, Member::Fate::kLeft);
      member.farewell = member.node->describe() + " has left the job";
      continue;
    }
    members_->note_gone(member, Member::Fate::kLost);
    member.farewell = member.cause =
        member.node->describe() + " was lost: it did not come back to the scheduler that was started again";
    ++lost_;
    is_whole_ = false;
    lost.push_back(&member);
  }
  for (const auto& [peer, message] : reunion.owed()) events_.send(peer, message);
  if (events_.on_epoch) events_.on_epoch(epoch_ + 1);  // before anybody is told to join
  end_view(lost.empty() ? "the scheduler was lost and started again" : lost.front()->cause);
  for (const Member* member : lost) {
    depart(*member, true, member->cause, std::nullopt);
    if (events_.on_lost) events_.on_lost(member->farewell);
  }
  for (const Peer peer : reunion.strangers()) {
    refuse(peer, {ErrorCode::kPeerLost, "the job goes on without this process", "it was lost before the scheduler"});
  }
  for (const auto& [peer, message] : reunion.leaves()) {
    if (Member* const member = members_->find(peer)) leave(*member, message);
  }
  tell_departed();
  if (phase_.is<Renewing>()) begin_when_all_are_back();
  if (!phase_.is<Over>()) end_if_all_left();
}

// ---- Those who enter

void Job::enter(Peer peer, const Join& join) {
  if (!join.node.has_loops() || (join.node.worker_rank == kNoRank && join.node.server_rank == kNoRank)) {
    return refuse(peer, {ErrorCode::kInvalidArgument, "this process is neither worker nor server",
                         "install the same bps_rdma version everywhere"});
  }
  const Node& first = members_->membership().nodes.front();
  if (const auto refused = refuse_terms(join.node.terms, first.terms, first.describe())) return refuse(peer, *refused);
  const Member* const known = members_->by_identity(join.node.identity);
  const auto is_same = [&](const auto& one) { return one.second.identity == join.node.identity; };
  if ((known != nullptr && known->fate == Member::Fate::kHere) || std::ranges::any_of(entering_, is_same)) {
    return refuse(peer, refuse_identity());
  }
  entering_.emplace_back(peer, join.node);
  patience_.begin(peer, Clock::now() + std::chrono::milliseconds(join.patience_ms));
  if (join.node.worker_rank == kNoRank) let_in();  // a server: the workers' steps do not depend on it
}

void Job::let_in() {
  if (!phase_.is<Running>() || entering_.empty()) return;
  std::string names;
  for (const auto& [peer, node] : entering_) {
    names += (names.empty() ? "" : ", ") + std::string("a process on ") + node.host + " (pid " +
             std::to_string(node.pid) + ")";
  }
  end_view(names + (entering_.size() == 1 ? " enters the job" : " enter the job"));
}

void Job::join_again(Peer peer, const Join& join) {
  Member* const member = members_->by_identity(join.node.identity);
  auto* renewing = phase_.in<Renewing>();
  const auto given_up = phase_.given_up();
  const bool is_awaited = renewing != nullptr && member != nullptr && member->is_awaited();
  if (!is_awaited || given_up) {
    return refuse(peer, given_up.value_or(Refused{ErrorCode::kPeerLost, "the job goes on without this process",
                                                  "it was lost, or took too long to join the next view"}));
  }
  Node node = join.node;
  node.worker_rank = member->node->worker_rank;
  node.server_rank = member->node->server_rank;
  members_->renew(*member, peer);
  renewing->rendezvous.add_again(peer, std::move(node));
  patience_.begin(peer, Clock::now() + std::chrono::milliseconds(join.patience_ms));
  begin_when_all_are_back();
}

// Or when nobody can come any more.
void Job::begin_when_all_are_back() {
  Renewing& renewing = *phase_.in<Renewing>();
  if (!goes_on() && !renewing.give_up) {
    renewing.give_up = Refused{ErrorCode::kPeerLost,
                               renewing.why + "; fewer workers are left than BPS_MIN_WORKERS demands, which is " +
                                   std::to_string(options_.terms.min_workers),
                               "start the job again from its last checkpoint"};
  }
  if (renewing.give_up) {
    entering_.clear();
    for (const Peer peer : patience_.end_all()) {
      renewing.rendezvous.remove(peer);
      refuse(peer, *renewing.give_up);
    }
    return;
  }
  if (std::ranges::any_of(members_->members(), &Member::is_awaited)) return;
  for (auto& [peer, node] : std::exchange(entering_, {})) renewing.rendezvous.add_new(peer, std::move(node));
  start(renewing.rendezvous.seat_again());
}

std::optional<Clock::time_point> Job::join_deadline() const {
  std::optional<Clock::time_point> first;
  if (const auto* reuniting = phase_.in<Reuniting>()) first = reuniting->until;
  const auto* suspended = phase_.in<Suspended>();
  if (suspended != nullptr && !suspended->rendezvous.has_workers()) first = suspended->until;
  const auto* gathering = phase_.in<Gathering>();
  const bool is_alone = gathering != nullptr && patience_.empty();
  if (options_.ends_alone && is_alone) first = gathering->alone_since + options_.join_timeout;
  if (const auto until = patience_.first()) first = std::min(first.value_or(*until), *until);
  return first;
}

void Job::finish(bool well) {
  phase_.begin(Over{well});
  if (events_.on_over) events_.on_over();
}

void Job::give_up() {
  if (phase_.is<Over>()) return;
  if (phase_.is<Reuniting>()) return reunite();
  if (phase_.is<Suspended>()) return give_up_suspended();
  const bool was_entering = refuse_late();
  if (was_entering || phase_.is<Running>()) return;  // it was not for one of the members
  if (auto* renewing = phase_.in<Renewing>()) {
    std::string awaited;
    for (const Member& member : members_->members()) {
      if (member.is_awaited()) awaited += (awaited.empty() ? "" : ", ") + member.node->describe();
    }
    renewing->give_up = Refused{ErrorCode::kTimeout, "the next view could not begin: it waits for " + awaited,
                                "look into the logs of these processes, or raise BPS_TIMEOUT"};
    return begin_when_all_are_back();
  }
  const std::string missing = phase_.in<Gathering>()->rendezvous.missing();
  finish(false);
  if (patience_.empty()) events_.on_lost("no member has come within BPS_JOIN_TIMEOUT");
  const Refused refused{ErrorCode::kTimeout, "not all members came in time: " + missing,
                        "start the missing processes, look into their logs, or raise BPS_JOIN_TIMEOUT"};
  for (const Peer peer : patience_.end_all()) events_.send(peer, refused);
}

// Refuses those who have waited too long to enter. False: there are none.
bool Job::refuse_late() {
  const std::string why =
      phase_.is<Running>() ? "the workers have not ended a step" : "the view that it is to be part of has not begun";
  const auto refused = std::erase_if(entering_, [&, now = Clock::now()](const auto& one) {
    if (!patience_.is_over(one.first, now)) return false;
    patience_.end(one.first);
    refuse(one.first, {ErrorCode::kTimeout, "this process could not enter the job: " + why,
                       "call commit() at the end of each step, or raise BPS_JOIN_TIMEOUT"});
    return true;
  });
  return refused > 0;
}

}  // namespace bps::van
