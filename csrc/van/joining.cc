// SPDX-License-Identifier: Apache-2.0
#include "van/joining.h"

#include <algorithm>

#include "core/log.h"

namespace bps::van {
namespace {

constexpr const char* kMayBeReplaced = "; the others wait on for a process in its place";

}  // namespace

bool Joining::knows(Peer peer) const {
  const auto* reuniting = record_.phase.in<Reuniting>();
  return waits(peer) || (reuniting != nullptr && reuniting->reunion.knows(peer)) ||
         record_.members->find(peer) != nullptr || record_.members->find_before(peer) != nullptr;
}

void Joining::refuse(Peer peer, const Refused& why) {
  ++refused_;
  job_.send(peer, why);
}

bool Joining::join(Peer peer, const Join& join) {
  const JobPhase& phase = record_.phase;
  if (knows(peer) || phase.is<Over>()) return false;  // cut off by a job that is over, a caller tries again
  // The job is running, and this scheduler will soon know it.
  if (phase.is<Reuniting>() || (phase.is<Gathering>() && join.renews != 0)) return false;
  const bool is_suspended = phase.is<Suspended>();
  // This process found this scheduler before it knew of the view to come.
  const std::uint32_t next_epoch = record_.epoch + (phase.is<Running>() ? 1 : 0);
  if ((record_.options.terms.min_workers != 0 || is_suspended) && join.epoch != next_epoch) return false;
  if (join.renews != 0) {
    return is_suspended ? resume_server(peer, join) : join_again(peer, join);
  } else if (phase.is<Gathering>() || is_suspended) {
    gather(peer, join);
  } else if (record_.options.terms.min_workers != 0 && !phase.given_up()) {
    enter(peer, join);
  } else if (phase.is<Running>() && record_.can_be_suspended()) {
    return false;  // some have suspended the job, and the others are about to
  } else {
    refuse(peer, {ErrorCode::kMismatch, "the job is running already: all its members have joined",
                  "another process uses the same BPS_JOB_ID: give each job its own, and end left-over processes"});
  }
  return true;
}

void Joining::gather(Peer peer, const Join& join) {
  Rendezvous& rendezvous = *record_.phase.rendezvous();
  if (const auto refused = rendezvous.add(peer, join)) return refuse(peer, *refused);
  const auto patience = std::min(record_.options.join_timeout, std::chrono::milliseconds(join.patience_ms));
  // A new server waits for as long as the others, before workers resume a suspended job.
  const bool waits_on = record_.phase.is<Suspended>() && join.node.worker_rank == kNoRank;
  patience_.begin(peer, waits_on ? Clock::time_point::max() : Clock::now() + patience);
  if (rendezvous.complete()) events_.on_complete(rendezvous.seat());
}

// A member of the view that has ended joins the next one. Where that cannot begin, a server waits on: it hears of the
// end of the job by its old connection, and workers may suspend the job instead.
bool Joining::join_again(Peer peer, const Join& join) {
  Member* const member = record_.members->by_identity(join.node.identity);
  auto* renewing = record_.phase.in<Renewing>();
  const auto given_up = record_.phase.given_up();
  const bool is_awaited = renewing != nullptr && member != nullptr && member->is_awaited();
  const bool serves_on = is_awaited && !member->is_worker();
  if (serves_on && given_up) {
    record_.members->renew(*member, peer);
    patience_.begin(peer, Clock::time_point::max());
    return true;
  }
  if (!is_awaited || given_up) {
    refuse(peer, given_up.value_or(Refused{ErrorCode::kPeerLost, "the job goes on without this process",
                                           "it was lost, or took too long to join the next view"}));
    return true;
  }
  const auto patience = std::chrono::milliseconds(join.patience_ms);
  seat_again(peer, join, *member, serves_on ? Clock::time_point::max() : Clock::now() + patience);
  events_.on_back();
  return true;
}

bool Joining::resume_server(Peer peer, const Join& join) {
  Member* const member = record_.members->by_identity(join.node.identity);
  if (member == nullptr || member->fate != Member::Fate::kHere) {
    refuse(peer, {ErrorCode::kPeerLost, "the suspended job does not wait for this process",
                  "it was lost before the workers suspended the job"});
    return true;
  }
  if (member->renewed_as != 0) return false;  // the end of its last connection has not been seen here yet
  seat_again(peer, join, *member, Clock::time_point::max());
  Rendezvous& rendezvous = *record_.phase.rendezvous();
  if (rendezvous.complete()) events_.on_complete(rendezvous.seat());
  return true;
}

// Seats a member with the ranks that it has had. No server of a suspended job is a worker.
void Joining::seat_again(Peer peer, const Join& join, Member& member, Clock::time_point until) {
  Node node = join.node;
  node.worker_rank = member.node->worker_rank;
  node.server_rank = member.node->server_rank;
  record_.members->renew(member, peer);
  record_.phase.rendezvous()->add_again(peer, std::move(node));
  patience_.begin(peer, until);
}

// ---- Those who wait to enter a job that is running

void Joining::enter(Peer peer, const Join& join) {
  if (!join.node.has_loops() || (join.node.worker_rank == kNoRank && join.node.server_rank == kNoRank)) {
    return refuse(peer, {ErrorCode::kInvalidArgument, "this process is neither worker nor server",
                         "install the same bps_rdma version everywhere"});
  }
  const Node& first = record_.members->membership().nodes.front();
  if (const auto refused = refuse_terms(join.node.terms, first.terms, first.describe())) return refuse(peer, *refused);
  const Member* const known = record_.members->by_identity(join.node.identity);
  const auto is_same = [&](const auto& one) { return one.second.identity == join.node.identity; };
  if ((known != nullptr && known->fate == Member::Fate::kHere) || std::ranges::any_of(entering_, is_same)) {
    return refuse(peer, refuse_identity());
  }
  entering_.emplace_back(peer, join.node);
  patience_.begin(peer, Clock::now() + std::chrono::milliseconds(join.patience_ms));
  if (join.node.worker_rank == kNoRank) events_.on_server();
}

std::size_t Joining::entering_workers() const {
  const auto is_worker = [](const auto& one) { return one.second.worker_rank != kNoRank; };
  return static_cast<std::size_t>(std::ranges::count_if(entering_, is_worker));
}

std::string Joining::describe_entrants() const {
  std::string names;
  for (const auto& [peer, node] : entering_) {
    names += (names.empty() ? "" : ", ") + std::string("a process on ") + node.host + " (pid " +
             std::to_string(node.pid) + ")";
  }
  return names + (entering_.size() == 1 ? " enters the job" : " enter the job");
}

bool Joining::refuse_late() {
  const std::string why = !record_.phase.is<Running>() ? "the view that it is to be part of has not begun"
                          : record_.goes_on()          ? "the workers have not ended a step"
                                                       : "fewer workers are left than BPS_MIN_WORKERS demands";
  const auto refused = std::erase_if(entering_, [&, now = Clock::now()](const auto& one) {
    if (!patience_.is_over(one.first, now)) return false;
    patience_.end(one.first);
    refuse(one.first, {ErrorCode::kTimeout, "this process could not enter the job: " + why,
                       "call commit() at the end of each step, or raise BPS_JOIN_TIMEOUT"});
    return true;
  });
  return refused > 0;
}

// ---- In the place of a lost scheduler

bool Joining::rejoin(Peer peer, const Rejoin& report) {
  JobPhase& phase = record_.phase;
  if (phase.is<Over>() || knows(peer)) return false;
  const bool may_come = phase.is<Gathering>() || phase.is<Reuniting>();
  if (!may_come || record_.options.terms.min_workers == 0) {
    // A process that is in this view was another node in an earlier one, which needs no answer.
    const Member* known = record_.members->by_identity(report.self().identity);
    const std::uint32_t epoch = record_.members->membership().epoch;
    if (known != nullptr && known->connected && epoch > report.membership.epoch) return true;
    refuse(peer, {ErrorCode::kPeerLost, "the job goes on without this process", "it came back too late"});
    return true;
  }
  auto* reuniting = phase.in<Reuniting>();
  Reunion first(record_.options.run);
  if (const auto refused = (reuniting != nullptr ? reuniting->reunion : first).add(peer, report)) {
    refuse(peer, *refused);
    return true;
  }
  if (reuniting == nullptr) {
    phase.begin(Reuniting{.reunion = std::move(first), .until = Clock::now() + record_.options.reunion_patience});
    // New processes that have come already do not know in which view they will be, so they try again.
    for (const Peer waiting : end_all()) {
      if (job_.close) job_.close(waiting);
    }
  }
  if (phase.in<Reuniting>()->reunion.complete()) events_.on_reunited();
  return true;
}

// ---- The end of a wait

Member* Joining::stop_waiting(Peer peer, const std::string& why) {
  patience_.end(peer);
  if (auto* gathering = record_.phase.in<Gathering>()) gathering->alone_since = Clock::now();
  auto* suspended = record_.phase.in<Suspended>();
  const bool had_workers = suspended != nullptr && suspended->rendezvous.has_workers();
  if (Rendezvous* rendezvous = record_.phase.rendezvous()) {
    if (suspended != nullptr) {
      rendezvous->remove(peer);
    } else if (const std::string lost = rendezvous->lose(peer, why); !lost.empty() && record_.phase.is<Gathering>()) {
      log_warning(lost + " was lost before all members have come: " + why + kMayBeReplaced);
    }
  }
  if (had_workers && !suspended->rendezvous.has_workers())
    suspended->until = Clock::now() + record_.options.resume_timeout;
  std::erase_if(entering_, [peer](const auto& one) { return one.first == peer; });
  Member* const member = record_.members->find_renewed(peer);
  if (member == nullptr || suspended == nullptr || !member->connected) return member;
  record_.members->renew(*member, 0);  // until workers come, a server may lose this connection, and make another one
  return nullptr;
}

}  // namespace bps::van
