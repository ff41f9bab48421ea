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
  if (std::holds_alternative<Heartbeat>(message)) return true;
  if (const auto* asked = std::get_if<Join>(&message)) return join(peer, *asked);
  Member* const member = members_ ? members_->find(peer) : nullptr;
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
                        [&](const Leave&) { return leave(*member), true; },
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
  calls_ = std::make_unique<Calls>(*members_, options_.registry, events_.send);
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

void Job::leave(Member& member) {
  if (member.fate != Member::Fate::kHere) return;
  member.fate = Member::Fate::kLeft;
  member.farewell = member.node->describe() + " has left the job";
  calls_->gone(member);
  end_if_all_left();
}

void Job::closed(Peer peer, const std::string& why) {
  if (patience_.erase(peer) != 0) return rendezvous_.remove(peer);
  Member* const member = members_ ? members_->find(peer) : nullptr;
  if (member == nullptr || !std::exchange(member->connected, false)) return;
  if (member->fate != Member::Fate::kHere || phase_ == Phase::kOver) return;
  member->fate = Member::Fate::kLost;
  member->farewell = member->node->describe() + " was lost: " + why;
  ++lost_;
  tell_all(PeerLost{member->node->id, member->farewell});
  calls_->gone(*member);
  if (events_.on_lost) events_.on_lost(member->farewell);
  end_if_all_left();
}

void Job::end_if_all_left() {
  if (phase_ == Phase::kOver) return;
  const auto is_here = [](const Member& member) { return member.is_worker() && member.fate == Member::Fate::kHere; };
  if (std::ranges::any_of(members_->members(), is_here)) return;
  finish();
  ended_well_ = lost_ == 0;
  tell_all(AllLeft{ended_well_});
}

void Job::tell_all(const Message& message) {
  for (const Member& member : members_->members()) {
    if (member.connected) events_.send(member.peer, message);
  }
}

}  // namespace bps::van
