// SPDX-License-Identifier: Apache-2.0
// Decides about one job, as the scheduler sees it (job_phase.h). It has no sockets: messages and losses come in,
// messages go out.
//
// Where min_workers allows it, the loss of a member ends a view, and not the job. A view also ends when the connection
// between two members breaks although both are here; in the next view they make another one. The survivors are told,
// and join again by new connections (renewing). When the last one has come, the next view begins, and the ranks close
// up. A survivor that is lost meanwhile is not waited for. A new process may enter such a job: it waits until all
// workers have come to the end of a step, or a member is lost, and is part of the view that begins then. Rounds,
// barriers and groups of the view that has ended are over.
//
// Where resume_timeout allows it, workers may suspend the job. When all have left and one of them has said that workers
// are going to come back, this scheduler and the servers that are no workers wait for them. The workers that come then
// say how many members there are.
//
// A scheduler that was started in the place of a lost one finds the job running: its members rejoin. When all have
// come, or have had their time, that view ends as if one of them had been lost, and the next one begins.
//
// Belongs to the scheduler's thread; its callbacks must not call back into it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/json.h"
#include "van/calls.h"
#include "van/inquiries.h"
#include "van/job_record.h"
#include "van/joining.h"
#include "van/link_follower.h"
#include "van/suspicions.h"

namespace bps::van {

class Job {
 public:
  using Phase = JobPhase::Name;
  using Options = JobOptions;
  using Events = JobEvents;
  // All members together send at most so many heartbeats, and get as many, so that these take a small part of a core.
  static constexpr std::uint32_t kBeatsPerSecond = 2000;

  Job(Options options, Events events);

  // Returns false where this peer may not send that, or not now. The caller then closes its connection.
  bool receive(Peer peer, Message&& message);
  // Tells all members who is gone since the last call. To be called soon after receive() and closed(): thousands may
  // leave at once, and all hear of all.
  void tell_departed();
  bool has_departed() const { return !departures_.nodes.empty(); }
  // To be called when the connection has ended, or was closed by the scheduler.
  void closed(Peer peer, const std::string& why);
  // Returns when the first wait is over, of a process that waits or of the job for its members. give_up() is to be
  // called then.
  std::optional<Clock::time_point> join_deadline() const;
  void give_up();

  // Returns null where the weights of servers do not change just now. Its look() is to be called a few times a second.
  LinkFollower* links() { return record_.phase.is<Running>() ? links_.get() : nullptr; }

  Phase phase() const { return record_.phase.name(); }
  std::uint32_t epoch() const { return record_.epoch; }
  // Returns what SIGUSR1 shows of it, as JSON: the phase, its members, who waits for whom in a call, and the groups.
  std::string dump() const;
  // Returns true once the job is over, if every worker left and nobody was lost.
  bool ended_well() const { return record_.phase.is<Over>() && record_.phase.in<Over>()->well; }
  // Returns true when this peer waits for the others, or is the connection of a member, in this view or the one before.
  bool knows(Peer peer) const { return joining_.knows(peer); }
  // Returns true when this peer need not send heartbeats now.
  bool waits(Peer peer) const;
  std::uint32_t beat_ms() const;  // the time between two heartbeats of a member
  struct Counts {
    std::uint64_t declared, barriers, lost, refused;
  };
  Counts counts() const;

 private:
  // Collects the members that are gone and of whom not all know yet.
  struct Departures {
    Departed news;
    std::vector<std::uint32_t> nodes;
    std::vector<std::pair<Peer, std::uint32_t>> calls;  // whose replies wait until all know

    // `text` is what all are told; where it is empty they are told nothing. The member wants a reply to its `call`.
    void add(const Member& member, bool is_lost, const std::string& text, std::optional<std::uint32_t> call = {});
  };

  JsonObject describe() const;
  bool receive_of_member(Member& member, Message&& message);
  // ---- Those who leave or are lost
  void leave(Member& member, const Leave& leave);
  void lose(Member& member, const std::string& why);
  bool suspect(const Member& from, const Suspect& suspect);
  void answer_suspicions(const Member& about, bool is_heard);
  void end_view_of_broken(Member& from, Member& about);
  void gone(const Member& member);
  void end_if_all_left();
  void finish(bool well);
  // ---- Views: job_views.cc
  void start(Rendezvous::Seating seating);
  void end_view(const std::string& why);
  void reunite();
  void let_in();
  void begin_when_all_are_back();
  void suspend(bool well);
  void give_up_suspended();

  const Events events_;
  JobRecord record_;
  Joining joining_;
  std::unique_ptr<Calls> calls_;         // null before the first view, and while the job is suspended
  std::unique_ptr<LinkFollower> links_;  // null where servers cannot get other weights
  Inquiries inquiries_;
  Suspicions suspicions_;
  Departures departures_;
  bool is_whole_ = true;  // nobody of this view was lost, or left because of a loss
  std::uint64_t lost_ = 0;
};

}  // namespace bps::van
