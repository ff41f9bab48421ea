// SPDX-License-Identifier: Apache-2.0
// A job whose workers have left to come back, and whose servers wait for them.
#include <algorithm>
#include <limits>

#include "van/job.h"

namespace bps::van {
namespace {

// A server waits for the scheduler to decide, and then some.
constexpr std::chrono::milliseconds kGrace{10000};

std::string seconds_text(std::chrono::milliseconds time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time).count()) + " s";
}

std::uint32_t to_ms(std::chrono::milliseconds time) {
  constexpr std::int64_t kMost = std::numeric_limits<std::uint32_t>::max();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(time.count(), 1, kMost));
}

}  // namespace

// The others will have left, too, or be lost: a member that suspends the job has the say.
bool Job::can_be_suspended() const {
  return options_.resume_timeout.count() > 0 && members_ &&
         std::ranges::any_of(members_->members(), [](const Member& member) { return member.suspends; });
}

// It was this in the view that has ended, and says nothing more.
bool Job::waits_for_resume(Peer peer) const {
  return phase_.is<Suspended>() && members_->find(peer) != nullptr;
}

// All workers have left.
void Job::suspend(bool well) {
  phase_.begin(Suspended{.well = well, .until = Clock::now() + options_.resume_timeout});
  calls_.reset();
  suspicions_.clear();
  suspicions_.forget_breaks();
  ++epoch_;
  if (events_.on_epoch) events_.on_epoch(epoch_);  // before anybody is told to join
  // Who has joined a view that does not begin, or waits to enter the job, tries again and is part of this one.
  entering_.clear();
  for (Member& member : members_->members()) members_->renew(member, 0);
  for (const Peer peer : patience_.end_all()) {
    if (events_.close) events_.close(peer);
  }
  const std::string what = "the workers have suspended the job; it waits " + seconds_text(options_.resume_timeout) +
                           " for workers that resume it";
  if (events_.on_suspended) events_.on_suspended(what);
  tell_here(ViewEnded{epoch_, what, to_ms(options_.resume_timeout + options_.join_timeout + kGrace)});
  for (const Member& member : members_->members()) {
    if (member.connected && member.fate != Member::Fate::kHere) events_.send(member.peer, AllLeft{well});
  }
}

void Job::resume_server(Peer peer, const Join& join) {
  Member* const member = members_->by_identity(join.node.identity);
  if (member == nullptr || member->fate != Member::Fate::kHere || member->renewed_as != 0) {
    return refuse(peer, {ErrorCode::kPeerLost, "the suspended job does not wait for this process",
                         "it was lost before the workers suspended the job"});
  }
  Node node = join.node;
  node.worker_rank = kNoRank;
  node.server_rank = member->node->server_rank;
  members_->renew(*member, peer);
  patience_.begin(peer, Clock::time_point::max());
  Rendezvous& rendezvous = *phase_.rendezvous();
  rendezvous.add_again(peer, std::move(node));
  if (rendezvous.complete()) start(rendezvous.seat());
}

// Servers that have come too late, or more than the workers want. Each hears it by the connection of the view before.
void Job::release_spare_servers(const std::vector<Peer>& seated) {
  for (const Member& member : members_->members()) {
    const bool is_seated = member.renewed_as != 0 && std::ranges::count(seated, member.renewed_as) > 0;
    if (member.fate != Member::Fate::kHere || is_seated) continue;
    events_.send(member.peer, AllLeft{true, "the workers have resumed the job with fewer servers"});
  }
}

void Job::give_up_suspended() {
  const Suspended& suspended = *phase_.in<Suspended>();
  const bool has_workers = suspended.rendezvous.has_workers();
  const std::string why =
      has_workers ? "the suspended job was not resumed by all members in time: " + suspended.rendezvous.missing()
                  : "nobody has resumed the job for " + seconds_text(options_.resume_timeout) + ", and it is over";
  const bool well = suspended.well && !has_workers;
  finish(well);
  if (events_.on_suspended) events_.on_suspended(why);
  tell_here(AllLeft{well, why});
  const Refused refused{ErrorCode::kTimeout, why,
                        "start the missing processes, look into their logs, or raise BPS_JOIN_TIMEOUT"};
  for (const Peer peer : patience_.end_all()) {
    const Member* const server = members_->find_renewed(peer);
    if (server == nullptr || !server->connected) events_.send(peer, refused);  // it has not heard it otherwise
  }
}

}  // namespace bps::van
