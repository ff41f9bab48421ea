// SPDX-License-Identifier: Apache-2.0
#include "van/job.h"

#include <algorithm>

namespace bps::van {
namespace {

template <typename... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <typename... F>
Overloaded(F...) -> Overloaded<F...>;

}  // namespace

Job::Job(Options options, Events events)
    : options_(std::move(options)),
      events_(std::move(events)),
      rendezvous_(options_.registry.workers, options_.registry.servers) {}

bool Job::knows(Peer peer) const {
  return patience_.contains(peer) || (members_ && members_->find(peer) != nullptr);
}

bool Job::receive(Peer peer, Message&& message) {
  if (const auto* asked = std::get_if<Join>(&message)) return join(peer, *asked);
  Member* const member = members_ ? members_->find(peer) : nullptr;
  // A sign of life; a Leave says itself what to tell those who suspect this member.
  if (!suspicions_.empty() && member != nullptr && !std::holds_alternative<Leave>(message)) answer_suspicions(*member);
  if (std::holds_alternative<Heartbeat>(message)) return true;
  if (member == nullptr || member->fate == Member::Fate::kLost) return false;
  const auto of_worker = [&](auto method, const auto& call) {
    if (!member->is_worker()) return false;
    ((*calls_).*method)(*member, call);
    return true;
  };
  return std::visit(Overloaded{
                        [&](const Declare& call) { return of_worker(&Calls::declare, call); },
                        [&](const Barrier& call) { return of_worker(&Calls::barrier, call); },
                        [&](const NewGroup& call) { return of_worker(&Calls::new_group, call); },
                        [&](const GroupAck& ack) { return calls_->group_ack(*member, ack), true; },
                        [&](const Cancel& call) { return calls_->cancel(*member, call), true; },
                        [&](const Leave& call) { return leave(*member, call), true; },
                        [&](const Suspect& call) { return suspect(*member, call.node); },
                        [](const auto&) { return false; },
                    },
                    message);
}

bool Job::join(Peer peer, const Join& join) {
  if (knows(peer) || phase_ == Phase::kOver) return false;  // cut off by a job that is over, a caller tries again
  std::optional<Refused> refused;
  if (phase_ == Phase::kRunning) {
    refused = Refused{ErrorCode::kMismatch, "the job is running already: all its members have joined",
                      "another process uses the same BPS_JOB_ID: give each job its own, and end left-over processes"};
  } else {
    refused = rendezvous_.add(peer, join);
  }
  if (refused) {
    ++refused_;
    events_.send(peer, *refused);
    return true;
  }
  const auto patience = std::min(options_.join_timeout, std::chrono::milliseconds(join.patience_ms));
  patience_[peer] = Clock::now() + patience;
  if (rendezvous_.complete()) start();
  return true;
}

void Job::start() {
  phase_ = Phase::kRunning;
  patience_.clear();
  members_ = std::make_unique<MemberTable>(rendezvous_.seat());
  Registry::Options registry = options_.registry;
  registry.cut.server_loops = members_->membership().all_server_loops();
  calls_ = std::make_unique<Calls>(*members_, std::move(registry), events_.send);
  Welcome welcome{.silence_ms = options_.silence_ms, .membership = members_->membership()};
  for (const Member& member : members_->members()) {
    welcome.you = member.node->id;
    events_.send(member.peer, welcome);
  }
}

std::optional<Clock::time_point> Job::join_deadline() const {
  std::optional<Clock::time_point> first;
  for (const auto& [peer, until] : patience_) first = std::min(first.value_or(until), until);
  return first;
}

void Job::finish() {
  phase_ = Phase::kOver;
  if (events_.on_over) events_.on_over();
}

void Job::give_up() {
  finish();
  const Refused refused{ErrorCode::kTimeout, "not all members came in time: " + rendezvous_.missing(),
                        "start the missing processes, look into their logs, or raise BPS_JOIN_TIMEOUT"};
  for (const auto& [peer, until] : std::exchange(patience_, {})) events_.send(peer, refused);
}

void Job::leave(Member& member, const Leave& leave) {
  if (member.fate != Member::Fate::kHere) return;
  member.fate = Member::Fate::kLeft;
  member.farewell = member.node->describe() + " has left the job";
  // It may have left because another rank is about to: whoever waits for it wants to know that one.
  if (!leave.failure.empty()) member.farewell += ", after: " + leave.failure;
  if (leave.reason.empty()) {
    if (member.is_worker()) tell_here(MemberLeft{member.node->id, member.farewell});
  } else {
    // What the lost one itself followed is the first cause; it may be a loss that only the leaving member saw.
    const Member* lost = members_->by_node(leave.lost_node);
    // Of a loss that nobody else saw, the one who saw it may be the cause as well as the one whom he lost: name both.
    member.cause = lost != nullptr && !lost->cause.empty() ? lost->cause : member.name() + " says: " + leave.reason;
    if (leave.lost_node == 0) {
      member.farewell = member.cause = member.name() + " ended: " + leave.reason;
      if (events_.on_lost) events_.on_lost(member.farewell);
    } else {
      member.farewell += " because of a loss: " + member.cause;
    }
    left_early_ = true;
    if (phase_ == Phase::kRunning) tell_all(PeerLost{member.node->id, member.cause}, member.peer);
  }
  events_.send(member.peer, Done{.call = leave.call});  // from now on it may close its connections
  answer_suspicions(member);
  calls_->gone(member);
  end_if_all_left();
}

// A broken connection alone does not tell whose fault it is: the other end may be dead, may have left because a third
// member is lost, or may be in good health. What the scheduler hears next of that member tells.
bool Job::suspect(const Member& from, std::uint32_t node) {
  const Member* about = members_->by_node(node);
  if (about == nullptr) return false;
  suspicions_.push_back({from.peer, node});
  if (about->fate != Member::Fate::kHere) answer_suspicions(*about);
  return true;
}

void Job::answer_suspicions(const Member& about) {
  const std::uint32_t node = about.node->id;
  for (const Suspicion& suspicion : suspicions_) {
    if (suspicion.node != node) continue;
    if (about.fate == Member::Fate::kHere) {
      events_.send(suspicion.from, Reachable{node});
    } else {
      events_.send(suspicion.from, PeerLost{node, about.cause.empty() ? about.farewell : about.cause});
    }
  }
  std::erase_if(suspicions_, [node](const Suspicion& one) { return one.node == node; });
}

void Job::closed(Peer peer, const std::string& why) {
  std::erase_if(suspicions_, [peer](const Suspicion& one) { return one.from == peer; });
  if (patience_.erase(peer) != 0) return rendezvous_.remove(peer);
  Member* const member = members_ ? members_->find(peer) : nullptr;
  if (member == nullptr || !std::exchange(member->connected, false)) return;
  if (member->fate != Member::Fate::kHere || phase_ == Phase::kOver) return;
  member->fate = Member::Fate::kLost;
  member->farewell = member->cause = member->node->describe() + " was lost: " + why;
  ++lost_;
  tell_all(PeerLost{member->node->id, member->cause});
  answer_suspicions(*member);
  calls_->gone(*member);
  if (events_.on_lost) events_.on_lost(member->farewell);
  end_if_all_left();
}

void Job::end_if_all_left() {
  if (phase_ == Phase::kOver) return;
  const auto is_here = [](const Member& member) { return member.is_worker() && member.fate == Member::Fate::kHere; };
  if (std::ranges::any_of(members_->members(), is_here)) return;
  finish();
  ended_well_ = lost_ == 0 && !left_early_;
  tell_all(AllLeft{ended_well_});
}

void Job::tell_here(const Message& message) {
  for (const Member& member : members_->members()) {
    if (member.fate == Member::Fate::kHere) events_.send(member.peer, message);
  }
}

void Job::tell_all(const Message& message, Peer except) {
  for (const Member& member : members_->members()) {
    if (member.connected && member.peer != except) events_.send(member.peer, message);
  }
}

}  // namespace bps::van
