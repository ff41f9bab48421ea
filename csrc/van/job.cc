// SPDX-License-Identifier: Apache-2.0
// Handles messages, and members that leave and are lost. How views follow each other is in job_views.cc.
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
    : events_(with_tell(std::move(events))),
      record_(std::move(options)),
      joining_(record_, events_,
               {.on_complete = [this](Rendezvous::Seating seating) { start(std::move(seating)); },
                .on_back = [this] { begin_when_all_are_back(); },
                .on_server = [this] { let_in(); },
                .on_reunited = [this] { reunite(); }}),
      inquiries_(events_.send) {}

// A member sends three heartbeats at least in the time after which the scheduler finds it lost.
std::uint32_t Job::beat_ms() const {
  const std::uint64_t members = record_.members->membership().nodes.size();
  const auto spread = static_cast<std::uint32_t>(members * 1000 / kBeatsPerSecond);
  return std::max(1U, std::min(std::max(kBeat_ms, spread), record_.options.silence_ms / 3));
}

// A member of a suspended job waits, too: this was its connection in the view that has ended, and brings nothing more.
bool Job::waits(Peer peer) const {
  return joining_.waits(peer) || (record_.phase.is<Suspended>() && record_.members->find(peer) != nullptr);
}

Job::Counts Job::counts() const {
  return {calls_ ? calls_->declared() : 0, calls_ ? calls_->barriers() : 0, lost_, joining_.refused()};
}

bool Job::receive(Peer peer, Message&& message) {
  if (!std::holds_alternative<Leave>(message) && !std::holds_alternative<Heartbeat>(message)) tell_departed();
  if (const auto* asked = std::get_if<Join>(&message)) return joining_.join(peer, *asked);
  if (const auto* report = std::get_if<Rejoin>(&message)) return joining_.rejoin(peer, *report);
  if (const auto* asked = std::get_if<Ask>(&message)) {
    inquiries_.ask(peer, *asked, *record_.members, [this] { return describe().end(); });
    return true;
  }
  if (auto* reuniting = record_.phase.in<Reuniting>(); reuniting != nullptr && reuniting->reunion.knows(peer)) {
    if (const auto* leave = std::get_if<Leave>(&message)) reuniting->reunion.add_leave(peer, *leave);
    return true;  // calls have to be made again in the next view
  }
  // Nothing of the view before matters any more, and its welcome to this one may not have been read yet.
  if (record_.members->find_before(peer) != nullptr) return !std::holds_alternative<Leave>(message);
  Member* const member = record_.members->find(peer);
  if (std::holds_alternative<Heartbeat>(message)) {
    // Only a heartbeat is a sign of life: it says that all threads of the member move. Any other message comes from one
    // of them.
    if (!suspicions_.empty() && member != nullptr) answer_suspicions(*member, true);
    return true;
  }
  return member != nullptr && member->fate != Member::Fate::kLost && receive_of_member(*member, std::move(message));
}

bool Job::receive_of_member(Member& member, Message&& message) {
  if (const auto* reply = std::get_if<Reply>(&message)) {
    inquiries_.reply(member, *reply);
    return true;
  }
  if ((record_.phase.is<Renewing>() || !calls_) && !std::holds_alternative<Leave>(message) &&
      !std::holds_alternative<Suspect>(message)) {
    return true;  // this is a call of the view that has ended, and has failed where it came from
  }
  const auto of_worker = [&](auto method, const auto& call) {
    if (!member.is_worker()) return false;
    ((*calls_).*method)(member, call);
    return true;
  };
  return std::visit(Overloaded{
                        [&](const Declare& call) { return of_worker(&Calls::declare, call); },
                        [&](const Barrier& call) { return of_worker(&Calls::barrier, call); },
                        [&](const NewGroup& call) { return of_worker(&Calls::new_group, call); },
                        [&](const LateRound& late) { return of_worker(&Calls::late_round, late); },
                        [&](const GroupAck& ack) {
                          calls_->group_ack(member, ack);
                          return true;
                        },
                        [&](const Cancel& call) {
                          calls_->cancel(member, call);
                          return true;
                        },
                        [&](const Leave& call) {
                          leave(member, call);
                          return true;
                        },
                        [&](const Suspect& call) { return suspect(member, call); },
                        [&](const LinkUse& use) { return links_ && links_->take(member, use); },
                        [&](Rounds& rounds) { return links_ && links_->take(member, std::move(rounds)); },
                        [](const auto&) { return false; },
                    },
                    message);
}

// Tells every Ask, as JSON, which processes the job waits for, and which calls wait for which ranks.
JsonObject Job::describe() const {
  constexpr const char* kPhases[] = {"gathering", "reuniting", "running", "renewing", "suspended", "over"};
  JsonObject state;
  state.add("phase", std::string(kPhases[static_cast<std::size_t>(phase())])).add("epoch", epoch());
  state.add("missing", record_.phase.missing());
  if (const auto* renewing = record_.phase.in<Renewing>()) {
    JsonList awaited;
    for (const Member& member : record_.members->all()) {
      if (member.is_awaited()) awaited.add(member.node->id);
    }
    state.add("why_renewed", renewing->why).add_raw("awaited", awaited.end());
  }
  if (calls_) state.add_raw("calls", calls_->waiting());
  if (links_) links_->describe(state);
  state.add_raw("members", describe_members(*record_.members, events_.silence_ms));
  return state;
}

std::string Job::dump() const {
  JsonObject state = describe();
  if (!calls_) state.add_raw("calls", "[]");
  state.add("role", std::string("scheduler")).add_raw("groups", calls_ ? calls_->groups() : "[]");
  return state.end();
}

// ---- Those who leave or are lost

void Job::leave(Member& member, const Leave& leave) {
  if (!member.is_here()) return;
  record_.members->note_gone(member, Member::Fate::kLeft);
  member.suspends = leave.suspends;
  member.farewell = member.node->describe() + (leave.suspends ? " has suspended the job" : " has left the job");
  // It may have left because another rank is about to. Those who wait for it want to know about that one.
  if (!leave.failure.empty()) member.farewell += ", after: " + leave.failure;
  if (leave.reason.empty()) {
    // Tells those, too, that have left, and this one: what they sum for others may wait for what it will not push.
    departures_.add(member, false, member.is_worker() ? member.farewell : "", leave.call);
  } else {
    // The cause of the lost member's end is the first cause. It may be a loss that only the leaving member saw.
    const Member* lost = record_.members->by_node(leave.lost_node);
    // If nobody else saw that loss, the member that saw it may be the cause as well as the one it lost: name both.
    member.cause = lost != nullptr && !lost->cause.empty() ? lost->cause : member.name() + " says: " + leave.reason;
    if (leave.lost_node == 0) {
      member.farewell = member.cause = member.name() + " ended: " + leave.reason;
      if (events_.on_lost) events_.on_lost(member.farewell);
    } else {
      member.farewell += " because of a loss: " + member.cause;
    }
    is_whole_ = false;
    if (record_.phase.is<Running>() && record_.goes_on()) end_view(member.cause);
    departures_.add(member, true, record_.phase.is<Over>() ? "" : member.cause, leave.call);
  }
}

void Job::Departures::add(const Member& member, bool is_lost, const std::string& text,
                          std::optional<std::uint32_t> call) {
  if (!text.empty()) news.members.push_back({member.node->id, is_lost, text});
  nodes.push_back(member.node->id);
  if (call) calls.emplace_back(member.peer, *call);
}

void Job::tell_departed() {
  if (!has_departed()) return;
  const Departures departed = std::exchange(departures_, {});
  if (!departed.news.members.empty()) events_.tell(record_.members->peers(&Member::connected), departed.news);
  for (const auto& [peer, call] : departed.calls) events_.send(peer, Done{.call = call});  // it may hang up from now on
  const MemberTable* const view = record_.members.get();
  for (const std::uint32_t node : departed.nodes) {
    if (record_.members.get() != view) return;  // the next view has begun meanwhile
    gone(*record_.members->by_node(node));
  }
}

// Goes on without a member that has left or is lost, once those are told who need to know.
void Job::gone(const Member& member) {
  if (links_) links_->call_off();
  answer_suspicions(member, false);
  if (record_.members->have_all_left() && (record_.can_be_suspended() || record_.phase.is<Renewing>()))
    return end_if_all_left();  // also instead of a view that has not begun
  if (record_.phase.is<Renewing>()) {
    begin_when_all_are_back();
  } else if (calls_) {
    calls_->gone(member);
  }
  end_if_all_left();
}

// A broken connection alone does not tell whose fault it is: the other end may be dead, may have left because a third
// member is lost, or may be in good health. What the scheduler hears next of that member tells.
bool Job::suspect(const Member& from, const Suspect& suspect) {
  const Member* about = record_.members->by_node(suspect.node);
  if (about == nullptr) return false;
  suspicions_.add(from.peer, suspect.node, suspect.broken);
  if (!about->is_here()) answer_suspicions(*about, false);
  return true;
}

void Job::answer_suspicions(const Member& about, bool is_heard) {
  const std::uint32_t node = about.node->id;
  const bool is_here = about.is_here();
  if (is_here && record_.phase.is<Running>() && record_.goes_on()) {
    const auto peer = suspicions_.find_broken(node, is_here);
    Member* const from = peer ? record_.members->find(*peer) : nullptr;
    if (from != nullptr) return end_view_of_broken(*from, *record_.members->find(about.peer));
  }
  for (const auto& [peer, is_broken] : suspicions_.take(about, is_heard)) {
    if (about.can_answer(is_broken)) {
      events_.send(peer, Reachable{node});
    } else {
      events_.send(peer, PeerLost{node, about.cause.empty() ? about.farewell : about.cause});
    }
  }
}

// The two would otherwise count each other as lost, and so would the ranks that wait for them. In the next view they
// connect again. If the network lets them do that over and over, and then carries nothing, one of them is lost.
void Job::end_view_of_broken(Member& from, Member& about) {
  const std::string both = from.node->describe() + " and " + about.node->describe();
  if (suspicions_.count_break(from.node->identity, about.node->identity)) {
    return end_view("the connection between " + both + " broke, although both are here");
  }
  Member& lost = suspicions_.choose_lost(*record_.members, from, about);
  lose(lost, "the network between " + both + " carries nothing, although both are here");
  events_.send(lost.peer, Refused{ErrorCode::kPeerLost, lost.cause, "look for what cuts the network between the two"});
}

void Job::closed(Peer peer, const std::string& why) {
  inquiries_.closed(peer);
  if (auto* reuniting = record_.phase.in<Reuniting>(); reuniting != nullptr && reuniting->reunion.knows(peer)) {
    reuniting->reunion.remove(peer);
    if (reuniting->reunion.empty()) reunite();
    return;
  }
  suspicions_.forget(peer);
  if (joining_.waits(peer)) {
    if (Member* const lost = joining_.stop_waiting(peer, why)) lose(*lost, why);
    return;
  }
  if (Member* const member = record_.members->find_before(peer)) return record_.members->set_before(*member, 0);
  Member* const member = record_.members->find(peer);
  if (member == nullptr || !std::exchange(member->connected, false)) return;
  if (member->fate == Member::Fate::kLeft) {
    if (calls_) calls_->disconnected(*member);
    answer_suspicions(*member, false);
  }
  const bool has_come_again = member->renewed_as != 0 && !record_.phase.given_up();
  if (member->is_here() && !record_.phase.is<Over>() && !has_come_again) lose(*member, why);
}

void Job::lose(Member& member, const std::string& why) {
  record_.members->note_gone(member, Member::Fate::kLost);
  member.farewell = member.cause = member.node->describe() + " was lost: " + why;
  ++lost_;
  is_whole_ = false;
  if (record_.phase.is<Running>() && record_.goes_on()) end_view(member.cause);
  departures_.add(member, true, member.cause);
  if (events_.on_lost) events_.on_lost(member.farewell);
}

void Job::end_if_all_left() {
  if (record_.phase.is<Over>() || record_.phase.is<Suspended>() || !record_.members->have_all_left()) return;
  if (record_.can_be_suspended()) return suspend(is_whole_);
  finish(is_whole_);
  events_.tell(record_.members->peers(&Member::connected), AllLeft{is_whole_});
  (void)joining_.take_entrants();
  for (const Peer peer : joining_.end_all()) {
    const Member* const member = record_.members->find_renewed(peer);
    if (member != nullptr && member->connected) continue;  // the member hears that by the connection that it had before
    joining_.refuse(peer, {ErrorCode::kPeerLost, "every worker has left the job", "start the job again"});
  }
}

void Job::finish(bool well) {
  record_.phase.begin(Over{well});
  if (events_.on_over) events_.on_over();
}

}  // namespace bps::van
