// SPDX-License-Identifier: Apache-2.0
// Messages, and how members leave and are lost. How views follow each other is in job_views.cc, what suspend() does in
// job_suspended.cc.
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

Job::Events with_tell(Job::Events events) {
  if (events.tell) return events;
  events.tell = [send = events.send](std::span<const Peer> peers, const Message& message) {
    for (const Peer peer : peers) send(peer, message);
  };
  return events;
}

constexpr std::uint32_t kBeat_ms = 500;

}  // namespace

Job::Job(Options options, Events events)
    : options_(std::move(options)),
      events_(with_tell(std::move(events))),
      phase_(Gathering{
          .rendezvous = {options_.registry.workers, options_.registry.servers, options_.terms, options_.origin}}),
      inquiries_(events_.send) {}

// Three heartbeats in the time after which the scheduler finds a member lost, at the least.
std::uint32_t Job::beat_ms() const {
  const std::uint64_t members = members_ ? members_->membership().nodes.size() : 0;
  const auto spread = static_cast<std::uint32_t>(members * 1000 / kBeatsPerSecond);
  return std::max(1U, std::min(std::max(kBeat_ms, spread), options_.silence_ms / 3));
}

bool Job::knows(Peer peer) const {
  const auto* reuniting = phase_.in<Reuniting>();
  return patience_.has(peer) || (reuniting != nullptr && reuniting->reunion.knows(peer)) ||
         (members_ && (members_->find(peer) != nullptr || members_->find_before(peer) != nullptr));
}

bool Job::receive(Peer peer, Message&& message) {
  if (!std::holds_alternative<Leave>(message) && !std::holds_alternative<Heartbeat>(message)) tell_departed();
  if (const auto* asked = std::get_if<Join>(&message)) return join(peer, *asked);
  if (const auto* asked = std::get_if<Ask>(&message)) {
    inquiries_.ask(peer, *asked, members_.get(), [this] { return describe().end(); });
    return true;
  }
  if (const auto* report = std::get_if<Rejoin>(&message)) return rejoin(peer, *report);
  if (auto* reuniting = phase_.in<Reuniting>(); reuniting != nullptr && reuniting->reunion.knows(peer)) {
    if (const auto* leave = std::get_if<Leave>(&message)) reuniting->reunion.add_leave(peer, *leave);
    return true;  // calls have to be made again in the next view
  }
  // Nothing of the view before is of interest any more, and its welcome to this one may not have been read yet.
  if (members_ && members_->find_before(peer) != nullptr) return !std::holds_alternative<Leave>(message);
  Member* const member = members_ ? members_->find(peer) : nullptr;
  if (std::holds_alternative<Heartbeat>(message)) {
    // The one sign of life: it says that all threads of the member move, where any other message comes from one of
    // them.
    if (!suspicions_.empty() && member != nullptr) answer_suspicions(*member);
    return true;
  }
  if (member == nullptr || member->fate == Member::Fate::kLost) return false;
  if (const auto* reply = std::get_if<Reply>(&message)) {
    inquiries_.reply(*member, *reply);
    return true;
  }
  if ((phase_.is<Renewing>() || !calls_) && !std::holds_alternative<Leave>(message) &&
      !std::holds_alternative<Suspect>(message)) {
    return true;  // a call of the view that has ended: it has failed where it came from
  }
  const auto of_worker = [&](auto method, const auto& call) {
    if (!member->is_worker()) return false;
    ((*calls_).*method)(*member, call);
    return true;
  };
  return std::visit(Overloaded{
                        [&](const Declare& call) { return of_worker(&Calls::declare, call); },
                        [&](const Barrier& call) { return of_worker(&Calls::barrier, call); },
                        [&](const NewGroup& call) { return of_worker(&Calls::new_group, call); },
                        [&](const GroupAck& ack) {
                          calls_->group_ack(*member, ack);
                          return true;
                        },
                        [&](const Cancel& call) {
                          calls_->cancel(*member, call);
                          return true;
                        },
                        [&](const Leave& call) {
                          leave(*member, call);
                          return true;
                        },
                        [&](const Suspect& call) { return suspect(*member, call); },
                        [&](const LinkUse& use) { return links_ && links_->take(*member, use); },
                        [&](Rounds& rounds) { return links_ && links_->take(*member, std::move(rounds)); },
                        [](const auto&) { return false; },
                    },
                    message);
}

// Tells every Ask, as JSON, which processes the job waits for, and which calls wait for which ranks.
JsonObject Job::describe() const {
  constexpr const char* kPhases[] = {"gathering", "reuniting", "running", "renewing", "suspended", "over"};
  JsonObject state;
  state.add("phase", std::string(kPhases[static_cast<std::size_t>(phase())])).add("epoch", epoch_);
  std::string missing;
  if (const auto* gathering = phase_.in<Gathering>()) missing = gathering->rendezvous.missing();
  if (const auto* suspended = phase_.in<Suspended>()) missing = suspended->rendezvous.missing();
  if (const auto* reuniting = phase_.in<Reuniting>()) missing = reuniting->reunion.progress();
  state.add("missing", missing);
  if (const auto* renewing = phase_.in<Renewing>()) {
    JsonList awaited;
    for (const Member& member : members_->members()) {
      if (member.is_awaited()) awaited.add(member.node->id);
    }
    state.add("why_renewed", renewing->why).add_raw("awaited", awaited.end());
  }
  if (calls_) state.add_raw("calls", calls_->waiting());
  if (links_) links_->describe(state);
  state.add_raw("members", members_ ? describe_members(*members_, events_.silence_ms) : "[]");
  return state;
}

std::string Job::dump() const {
  JsonObject state = describe();
  if (!calls_) state.add_raw("calls", "[]");
  state.add("role", std::string("scheduler")).add_raw("groups", calls_ ? calls_->groups() : "[]");
  return state.end();
}

bool Job::join(Peer peer, const Join& join) {
  if (knows(peer) || phase_.is<Over>()) return false;  // cut off by a job that is over, a caller tries again
  // The job is running, and will be known here soon.
  if (phase_.is<Reuniting>() || (phase_.is<Gathering>() && join.renews != 0)) return false;
  const bool is_suspended = phase_.is<Suspended>();
  // It has found this scheduler before that knew of the view to come.
  const std::uint32_t next_epoch = epoch_ + (phase_.is<Running>() ? 1 : 0);
  if ((options_.terms.min_workers != 0 || is_suspended) && join.epoch != next_epoch) return false;
  const bool gathers = phase_.is<Gathering>() || is_suspended;
  if (join.renews != 0) {
    is_suspended ? resume_server(peer, join) : join_again(peer, join);
  } else if (gathers) {
    gather(peer, join);
  } else if (options_.terms.min_workers != 0 && !phase_.given_up()) {
    enter(peer, join);
  } else if (phase_.is<Running>() && can_be_suspended()) {
    return false;  // some have suspended the job, and the others are about to
  } else {
    refuse(peer, {ErrorCode::kMismatch, "the job is running already: all its members have joined",
                  "another process uses the same BPS_JOB_ID: give each job its own, and end left-over processes"});
  }
  return true;
}

void Job::gather(Peer peer, const Join& join) {
  Rendezvous& rendezvous = *phase_.rendezvous();
  if (const auto refused = rendezvous.add(peer, join)) return refuse(peer, *refused);
  const auto patience = std::min(options_.join_timeout, std::chrono::milliseconds(join.patience_ms));
  // Before workers resume a suspended job, a new server waits for as long as the others.
  const bool waits_on = phase_.is<Suspended>() && join.node.worker_rank == kNoRank;
  patience_.begin(peer, waits_on ? Clock::time_point::max() : Clock::now() + patience);
  if (rendezvous.complete()) start(rendezvous.seat());
}

void Job::refuse(Peer peer, const Refused& why) {
  ++refused_;
  events_.send(peer, why);
}

void Job::start(Rendezvous::Seating seating) {
  const bool begins_anew = phase_.is<Suspended>();
  if (begins_anew) release_spare_servers(seating.peers);
  phase_.begin(Running{});
  (void)patience_.end_all();
  suspicions_.clear();
  is_whole_ = true;
  const Terms terms = seating.membership.nodes.front().terms;
  add_embedded_servers(seating.membership);
  seating.membership.epoch = epoch_;
  seating.membership.take_slots(members_ && !begins_anew ? members_->membership().slots : std::vector<std::uint64_t>());
  // Who connects from here on will be in the next view, if in any.
  if (options_.terms.min_workers != 0 && events_.on_epoch) events_.on_epoch(epoch_ + 1);
  const auto before = std::exchange(members_, std::make_unique<MemberTable>(std::move(seating)));
  // A process that is stopped just now reads that one first, perhaps, and must not find there that it is lost.
  for (Member& member : members_->members()) {
    const Member* const was = before ? before->find_renewed(member.peer) : nullptr;
    if (was != nullptr && was->connected) members_->set_before(member, was->peer);
  }
  Registry::Options registry = options_.registry;
  registry.workers = members_->membership().workers;
  registry.servers = static_cast<std::uint32_t>(members_->membership().slots.size());
  if (calls_) registry.before = calls_->placements();
  registry.balanced = terms.key_hash == "balanced";
  const Membership& members = members_->membership();
  const auto weights = ServerWeights::of_job(members, Hosts(members));
  const auto group_of = [this](std::uint32_t group) { return calls_->group(group); };
  links_ = can_shift(members) ? std::make_unique<LinkFollower>(*members_, events_.tell, group_of) : nullptr;
  if (weights && registry.balanced) {
    registry.weights = [weights = *weights, slots = members.server_of_slot()](const Group& group) {
      return weights.by_slot(group, slots);
    };
  }
  registry.cut.server_loops = members_->membership().all_server_loops();
  calls_ = std::make_unique<Calls>(*members_, std::move(registry), events_.send, [this] {
    suspicions_.forget_breaks();
    let_in();
  });
  events_.tell(members_->peers([](const Member&) { return true; }), Welcome{.silence_ms = options_.silence_ms,
                                                                            .beat_ms = beat_ms(),
                                                                            .run = options_.run,
                                                                            .membership = members_->membership()});
}

void Job::leave(Member& member, const Leave& leave) {
  if (member.fate != Member::Fate::kHere) return;
  members_->note_gone(member, Member::Fate::kLeft);
  member.suspends = leave.suspends;
  member.farewell = member.node->describe() + (leave.suspends ? " has suspended the job" : " has left the job");
  // It may have left because another rank is about to: those who wait for it want to know that one.
  if (!leave.failure.empty()) member.farewell += ", after: " + leave.failure;
  if (leave.reason.empty()) {
    // Also those that have left, itself among them: what they sum for others may wait for what it will not push.
    depart(member, false, member.is_worker() ? member.farewell : "", leave.call);
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
    is_whole_ = false;
    if (phase_.is<Running>() && goes_on()) end_view(member.cause);
    depart(member, true, phase_.is<Over>() ? "" : member.cause, leave.call);
  }
}

// `text`: what all are told; "" nothing. `call`: to which the member itself wants a reply.
void Job::depart(const Member& member, bool is_lost, const std::string& text, std::optional<std::uint32_t> call) {
  if (!text.empty()) departing_.news.members.push_back({member.node->id, is_lost, text});
  departing_.nodes.push_back(member.node->id);
  if (call) departing_.calls.emplace_back(member.peer, *call);
}

void Job::tell_departed() {
  if (departing_.nodes.empty()) return;
  const Departing departed = std::exchange(departing_, {});
  if (!departed.news.members.empty()) tell_all(departed.news);
  for (const auto& [peer, call] : departed.calls) events_.send(peer, Done{.call = call});  // it may hang up from now on
  const MemberTable* const view = members_.get();
  for (const std::uint32_t node : departed.nodes) {
    if (members_.get() != view) return;  // the next view has begun meanwhile
    gone(*members_->by_node(node));
  }
}

// Of a member that has left or is lost, when those who need to know have been told.
void Job::gone(const Member& member) {
  if (links_) links_->call_off();
  answer_suspicions(member);
  if (have_all_left() && can_be_suspended()) return end_if_all_left();  // also instead of a view that has not begun
  if (phase_.is<Renewing>()) {
    begin_when_all_are_back();
  } else if (calls_) {
    calls_->gone(member);
  }
  end_if_all_left();
}

// A broken connection alone does not tell whose fault it is: the other end may be dead, may have left because a third
// member is lost, or may be in good health. What the scheduler hears next of that member tells.
bool Job::suspect(const Member& from, const Suspect& suspect) {
  const Member* about = members_->by_node(suspect.node);
  if (about == nullptr) return false;
  suspicions_.add(from.peer, suspect.node, suspect.broken);
  if (about->fate != Member::Fate::kHere) answer_suspicions(*about);
  return true;
}

void Job::answer_suspicions(const Member& about) {
  const std::uint32_t node = about.node->id;
  const bool is_here = about.fate == Member::Fate::kHere;
  if (is_here && phase_.is<Running>() && goes_on()) {
    const auto peer = suspicions_.find_broken(node, is_here);
    Member* const from = peer ? members_->find(*peer) : nullptr;
    if (from != nullptr) return end_view_of_broken(*from, *members_->find(about.peer));
  }
  for (const Peer peer : suspicions_.take(node, is_here)) {
    if (is_here) {
      events_.send(peer, Reachable{node});
    } else {
      events_.send(peer, PeerLost{node, about.cause.empty() ? about.farewell : about.cause});
    }
  }
}

// The two would otherwise count each other as lost, and so would the ranks that wait for them. In the next view they
// connect again; where the network lets them do that over and over, and then carries nothing, one of them is lost.
void Job::end_view_of_broken(Member& from, Member& about) {
  const std::string both = from.node->describe() + " and " + about.node->describe();
  if (suspicions_.count_break(from.node->identity, about.node->identity)) {
    return end_view("the connection between " + both + " broke, although both are here");
  }
  Member& lost = choose_lost(from, about);
  lose(lost, "the network between " + both + " carries nothing, although both are here");
  events_.send(lost.peer, Refused{ErrorCode::kPeerLost, lost.cause, "look for what cuts the network between the two"});
}

// Chooses a server without which the job goes on, or else the member that has lost more connections.
Member& Job::choose_lost(Member& one, Member& other) {
  const auto is_spare = [this](const Member& member) {
    return !member.is_worker() && std::ranges::any_of(members_->members(), [&](const Member& each) {
      return &each != &member && each.fate == Member::Fate::kHere && each.node->server_rank >= 0;
    });
  };
  if (is_spare(one) != is_spare(other)) return is_spare(one) ? one : other;
  if (one.is_worker() != other.is_worker()) return one.is_worker() ? one : other;
  const auto breaks = [this](const Member& member) { return suspicions_.broken_pairs_of(member.node->identity); };
  return breaks(one) > breaks(other) ? one : other;
}

void Job::closed(Peer peer, const std::string& why) {
  inquiries_.closed(peer);
  if (auto* reuniting = phase_.in<Reuniting>(); reuniting != nullptr && reuniting->reunion.knows(peer)) {
    reuniting->reunion.remove(peer);
    if (reuniting->reunion.empty()) reunite();
    return;
  }
  suspicions_.forget(peer);
  if (patience_.end(peer)) return stop_waiting(peer, why);
  if (Member* const member = members_ ? members_->find_before(peer) : nullptr) {
    members_->set_before(*member, 0);
    return;
  }
  Member* const member = members_ ? members_->find(peer) : nullptr;
  if (member == nullptr || !std::exchange(member->connected, false)) return;
  if (calls_ && member->fate == Member::Fate::kLeft) calls_->disconnected(*member);
  const bool has_come_again = member->renewed_as != 0 && !phase_.given_up();
  if (member->fate == Member::Fate::kHere && !phase_.is<Over>() && !has_come_again) lose(*member, why);
}

// The connection has ended by which a process waits for the others.
void Job::stop_waiting(Peer peer, const std::string& why) {
  if (auto* gathering = phase_.in<Gathering>()) gathering->alone_since = Clock::now();
  auto* suspended = phase_.in<Suspended>();
  const bool had_workers = suspended != nullptr && suspended->rendezvous.has_workers();
  if (Rendezvous* rendezvous = phase_.rendezvous()) rendezvous->remove(peer);
  if (had_workers && !suspended->rendezvous.has_workers()) suspended->until = Clock::now() + options_.resume_timeout;
  std::erase_if(entering_, [peer](const auto& one) { return one.first == peer; });
  Member* const member = members_ ? members_->find_renewed(peer) : nullptr;
  if (member == nullptr) return;
  if (suspended != nullptr && member->connected) {
    members_->renew(*member, 0);  // until workers come, a server may lose this connection, and make another one
  } else {
    lose(*member, why);
  }
}

void Job::lose(Member& member, const std::string& why) {
  members_->note_gone(member, Member::Fate::kLost);
  member.farewell = member.cause = member.node->describe() + " was lost: " + why;
  ++lost_;
  is_whole_ = false;
  if (phase_.is<Running>() && goes_on()) end_view(member.cause);
  depart(member, true, member.cause, std::nullopt);
  if (events_.on_lost) events_.on_lost(member.farewell);
}

bool Job::have_all_left() const {
  const auto is_here = [](const Member& member) { return member.is_worker() && member.fate == Member::Fate::kHere; };
  return std::ranges::none_of(members_->members(), is_here);
}

void Job::end_if_all_left() {
  if (phase_.is<Over>() || phase_.is<Suspended>() || !have_all_left()) return;
  if (can_be_suspended()) return suspend(is_whole_);
  finish(is_whole_);
  tell_all(AllLeft{is_whole_});
}

void Job::tell_here(const Message& message) {
  events_.tell(members_->peers([](const Member& member) { return member.fate == Member::Fate::kHere; }), message);
}

void Job::tell_all(const Message& message) {
  events_.tell(members_->peers(&Member::connected), message);
}

}  // namespace bps::van
