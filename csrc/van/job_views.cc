// SPDX-License-Identifier: Apache-2.0
// Makes one view follow another: after a loss, in the place of a lost scheduler, with those who enter, and when workers
// have left to come back.
#include <algorithm>
#include <limits>

#include "van/job.h"
#include "van/server_weights.h"

namespace bps::van {
namespace {

// A server waits for the scheduler to decide, and this long beyond that.
constexpr std::chrono::milliseconds kGrace{10000};

std::string seconds_text(std::chrono::milliseconds time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

std::uint32_t to_ms(std::chrono::milliseconds time) {
  constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(time.count(), 1, kMost));
}

// Returns the options of the registry for a view of these members.
Registry::Options registry_of(Registry::Options registry, const Membership& members) {
  registry.workers = members.workers;
  registry.servers = static_cast<std::uint32_t>(members.slots.size());
  registry.balanced = members.nodes.front().terms.key_hash == "balanced";
  registry.cut.server_loops = members.all_server_loops();
  const auto weights = ServerWeights::of_job(members, Hosts(members));
  if (weights && registry.balanced) {
    registry.weights = [weights = *weights, slots = members.server_of_slot()](const Group& group) {
      return weights.by_slot(group, slots);
    };
  }
  return registry;
}

}  // namespace

// ---- From one view to the next

void Job::start(Rendezvous::Seating seating) {
  const bool begins_anew = record_.phase.is<Suspended>();
  for (const Member& member : record_.members->all()) {
    if (!begins_anew || !member.is_here()) continue;
    if (member.renewed_as != 0 && std::ranges::count(seating.peers, member.renewed_as) > 0) continue;
    // A server that came too late, or one more than the workers want, reads this by the connection that it had before.
    events_.send(member.peer, AllLeft{true, "the workers have resumed the job with fewer servers"});
  }
  record_.phase.begin(Running{});
  (void)joining_.end_all();
  suspicions_.clear();
  is_whole_ = true;
  add_embedded_servers(seating.membership);
  seating.membership.epoch = record_.epoch;
  seating.membership.take_slots(begins_anew ? std::vector<std::uint64_t>() : record_.members->membership().slots);
  // A member that connects from here on will be in the next view, if in any.
  if (record_.options.terms.min_workers != 0 && events_.on_epoch) events_.on_epoch(record_.epoch + 1);
  const auto before = std::exchange(record_.members, std::make_unique<MemberTable>(std::move(seating)));
  // A process that is stopped just now may read from that connection first, and must not find there that it is lost.
  for (Member& member : record_.members->all()) {
    const Member* const was = before->find_renewed(member.peer);
    if (was != nullptr && was->connected) record_.members->set_before(member, was->peer);
  }
  const Membership& members = record_.members->membership();
  const auto group_of = [this](std::uint32_t group) { return calls_->group(group); };
  links_ = can_shift(members) ? std::make_unique<LinkFollower>(*record_.members, events_.tell, group_of) : nullptr;
  Registry::Options registry = registry_of(record_.options.registry, members);
  if (calls_) registry.before = calls_->placements();
  calls_ = std::make_unique<Calls>(*record_.members, std::move(registry), events_.send, [this] {
    suspicions_.forget_breaks();
    let_in();
  });
  const Welcome welcome{.silence_ms = record_.options.silence_ms,
                        .beat_ms = beat_ms(),
                        .run = record_.options.run,
                        .membership = members};
  events_.tell(record_.members->peers([](const Member&) { return true; }), welcome);
}

void Job::end_view(const std::string& why) {
  tell_departed();
  record_.phase.begin(Renewing{.why = why});
  suspicions_.clear();
  ++record_.epoch;
  std::vector<std::uint32_t> left;
  for (const Member& member : record_.members->all()) {
    if (member.is_here() && member.is_worker()) left.push_back(member.rank());
  }
  const std::size_t workers = left.size() + joining_.entering_workers();
  const std::string text = why + "; view " + std::to_string(record_.epoch - 1) + " of " +
                           std::to_string(record_.members->membership().workers) + " workers has ended, view " +
                           std::to_string(record_.epoch) + " begins with " + std::to_string(workers) +
                           ", among them the former " + name_ranks(left);
  events_.tell(record_.members->peers(&Member::is_here), ViewEnded{record_.epoch, text});
  // A member that has left waits for the others, which may need its server. In the next view nobody needs it.
  for (const Member& member : record_.members->all()) {
    if (member.serves_on()) events_.send(member.peer, AllLeft{true});
  }
}

// ---- In the place of a lost scheduler

// Ends the view that was lost with its scheduler, which is known as far as it can be.
void Job::reunite() {
  const Reunion reunion = std::move(record_.phase.in<Reuniting>()->reunion);
  if (reunion.empty()) {  // all are gone again
    return record_.phase.begin(Gathering{
        .rendezvous = {record_.options.registry.workers, record_.options.registry.servers, record_.options.terms}});
  }
  record_.members = std::make_unique<MemberTable>(reunion.seating());
  record_.epoch = record_.members->membership().epoch;
  std::vector<Member*> lost;
  for (Member& member : record_.members->all()) {
    if (member.peer != 0) continue;
    member.connected = false;
    if (reunion.has_left(member.node->id)) {
      record_.members->note_gone(member, Member::Fate::kLeft);
      member.farewell = member.node->describe() + " has left the job";
      continue;
    }
    record_.members->note_gone(member, Member::Fate::kLost);
    member.farewell = member.cause =
        member.node->describe() + " was lost: it did not come back to the scheduler that was started again";
    ++lost_;
    is_whole_ = false;
    lost.push_back(&member);
  }
  for (const auto& [peer, message] : reunion.owed()) events_.send(peer, message);
  if (events_.on_epoch) events_.on_epoch(record_.epoch + 1);  // before anybody is told to join
  end_view(lost.empty() ? "the scheduler was lost and started again" : lost.front()->cause);
  for (const Member* member : lost) {
    departures_.add(*member, true, member->cause);
    if (events_.on_lost) events_.on_lost(member->farewell);
  }
  for (const Peer peer : reunion.strangers()) {
    joining_.refuse(peer,
                    {ErrorCode::kPeerLost, "the job goes on without this process", "it was lost before the scheduler"});
  }
  for (const auto& [peer, message] : reunion.leaves()) {
    if (Member* const member = record_.members->find(peer)) leave(*member, message);
  }
  tell_departed();
  if (record_.phase.is<Renewing>()) begin_when_all_are_back();
  if (!record_.phase.is<Over>()) end_if_all_left();
}

// ---- Those who enter, and those who come again

void Job::let_in() {
  if (record_.phase.is<Running>() && record_.goes_on() && joining_.has_entrants())
    end_view(joining_.describe_entrants());
}

// Begins the next view, or refuses those who wait for it when nobody can come any more.
void Job::begin_when_all_are_back() {
  Renewing& renewing = *record_.phase.in<Renewing>();
  if (!record_.goes_on() && !renewing.give_up) {
    renewing.give_up = Refused{ErrorCode::kPeerLost,
                               renewing.why + "; fewer workers are left than BPS_MIN_WORKERS demands, which is " +
                                   std::to_string(record_.options.terms.min_workers),
                               "start the job again from its last checkpoint"};
  }
  if (renewing.give_up) {
    (void)joining_.take_entrants();
    for (const Peer peer : joining_.end_all()) {
      renewing.rendezvous.remove(peer);
      Member* const member = record_.members->find_renewed(peer);
      if (member == nullptr || member->is_worker()) {
        joining_.refuse(peer, *renewing.give_up);
      } else {
        // A server hears how the workers leave by its old connection. Those who resume the job may need it.
        record_.members->renew(*member, 0);
        if (events_.close) events_.close(peer);
      }
    }
    return;
  }
  if (std::ranges::any_of(record_.members->all(), &Member::is_awaited)) return;
  for (auto& [peer, node] : joining_.take_entrants()) renewing.rendezvous.add_new(peer, std::move(node));
  start(renewing.rendezvous.seat_again());
}

std::optional<Clock::time_point> Job::join_deadline() const {
  std::optional<Clock::time_point> first;
  if (const auto* reuniting = record_.phase.in<Reuniting>()) first = reuniting->until;
  const auto* suspended = record_.phase.in<Suspended>();
  if (suspended != nullptr && !suspended->rendezvous.has_workers()) first = suspended->until;
  const auto* gathering = record_.phase.in<Gathering>();
  const bool is_alone = gathering != nullptr && joining_.is_empty();
  if (record_.options.ends_alone && is_alone) first = gathering->alone_since + record_.options.join_timeout;
  if (const auto until = joining_.deadline()) first = std::min(first.value_or(*until), *until);
  return first;
}

void Job::give_up() {
  if (record_.phase.is<Over>()) return;
  if (record_.phase.is<Reuniting>()) return reunite();
  if (record_.phase.is<Suspended>()) return give_up_suspended();
  const bool was_entering = joining_.refuse_late();
  if (was_entering || record_.phase.is<Running>()) return;  // the wait was not for one of the members
  if (auto* renewing = record_.phase.in<Renewing>()) {
    std::string awaited;
    for (const Member& member : record_.members->all()) {
      if (member.is_awaited()) awaited += (awaited.empty() ? "" : ", ") + member.node->describe();
    }
    renewing->give_up = Refused{ErrorCode::kTimeout, "the next view could not begin: it waits for " + awaited,
                                "look into the logs of these processes, or raise BPS_TIMEOUT"};
    return begin_when_all_are_back();
  }
  const std::string missing = record_.phase.in<Gathering>()->rendezvous.missing();
  finish(false);
  if (joining_.is_empty()) events_.on_lost("no member has come within BPS_JOIN_TIMEOUT");
  const Refused refused{ErrorCode::kTimeout, "not all members came in time: " + missing,
                        "start the missing processes, look into their logs, or raise BPS_JOIN_TIMEOUT"};
  for (const Peer peer : joining_.end_all()) events_.send(peer, refused);
}

// ---- A job whose workers have left to come back, and whose servers wait for them

// Is called when all workers have left.
void Job::suspend(bool well) {
  record_.phase.begin(Suspended{.well = well, .until = Clock::now() + record_.options.resume_timeout});
  calls_.reset();
  suspicions_.clear();
  suspicions_.forget_breaks();
  ++record_.epoch;
  if (events_.on_epoch) events_.on_epoch(record_.epoch);  // before anybody is told to join
  // A member that has joined a view which does not begin, or waits to enter the job, tries again and becomes part of
  // this one.
  (void)joining_.take_entrants();
  for (Member& member : record_.members->all()) record_.members->renew(member, 0);
  for (const Peer peer : joining_.end_all()) {
    if (events_.close) events_.close(peer);
  }
  const std::string what = "the workers have suspended the job; it waits " +
                           seconds_text(record_.options.resume_timeout) + " for workers that resume it";
  if (events_.on_suspended) events_.on_suspended(what);
  const std::uint32_t patience_ms = to_ms(record_.options.resume_timeout + record_.options.join_timeout + kGrace);
  events_.tell(record_.members->peers(&Member::is_here), ViewEnded{record_.epoch, what, patience_ms});
  for (const Member& member : record_.members->all()) {
    if (member.connected && !member.is_here()) events_.send(member.peer, AllLeft{well});
  }
}

void Job::give_up_suspended() {
  const Suspended& suspended = *record_.phase.in<Suspended>();
  const bool has_workers = suspended.rendezvous.has_workers();
  const std::string why =
      has_workers
          ? "the suspended job was not resumed by all members in time: " + suspended.rendezvous.missing()
          : "nobody has resumed the job for " + seconds_text(record_.options.resume_timeout) + ", and it is over";
  const bool well = suspended.well && !has_workers;
  finish(well);
  if (events_.on_suspended) events_.on_suspended(why);
  events_.tell(record_.members->peers(&Member::is_here), AllLeft{well, why});
  const Refused refused{ErrorCode::kTimeout, why,
                        "start the missing processes, look into their logs, or raise BPS_JOIN_TIMEOUT"};
  for (const Peer peer : joining_.end_all()) {
    const Member* const server = record_.members->find_renewed(peer);
    if (server == nullptr || !server->connected) events_.send(peer, refused);  // the server has not heard it otherwise
  }
}

}  // namespace bps::van
