// SPDX-License-Identifier: Apache-2.0
// One job as the scheduler sees it (job_phase.h). No sockets: messages and losses come in, messages go out.
//
// Where min_workers allows it, the loss of a member ends a view, and not the job; so does a connection between two
// members that breaks although both are here: in the next view they make another one. The survivors are told, and join
// again by new connections (renewing); when the last one has come, the next view begins with closed-up ranks. A
// survivor that is lost meanwhile is not waited for. A new process may enter such a job: it waits until all workers
// have come to the end of a step, or a member is lost, and is part of the view that begins then. Rounds, barriers and
// groups of the view that has ended are over.
//
// Where resume_timeout allows it, workers may suspend the job: when all have left and one of them has said that workers
// are going to come back, the servers that are no workers and this scheduler wait for those. Gathering begins anew,
// with as many members as the workers say that come.
//
// A scheduler that was started in the place of a lost one finds the job running: its members rejoin. When all have
// come, or have had their time, that view ends as if one of them had been lost, and the next one begins.
//
// Belongs to the scheduler's thread; its callbacks must not call back into it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/clock.h"
#include "core/json.h"
#include "van/calls.h"
#include "van/inquiries.h"
#include "van/job_phase.h"
#include "van/link_follower.h"
#include "van/member_table.h"
#include "van/patience.h"
#include "van/server_weights.h"
#include "van/suspicions.h"

namespace bps::van {

class Job {
 public:
  using Phase = JobPhase::Name;
  using Tell = Shift::Tell;
  // Heartbeats of all members together, and as many to them: they take a small part of a core.
  static constexpr std::uint32_t kBeatsPerSecond = 2000;

  struct Options {
    Registry::Options registry;       // with the numbers of workers and servers
    std::uint32_t silence_ms = 1500;  // told to the members
    std::chrono::milliseconds join_timeout{60000};
    bool ends_alone = false;                      // also when it has waited that long without any member
    std::chrono::milliseconds resume_timeout{0};  // for workers to resume a suspended job; 0: none can be suspended
    Terms terms{};    // of the rank that hosts the scheduler, or of the scheduler; min_workers: the job goes on while
                      // there are so many; 0: only as it has begun
    Origin origin{};  // of the rank that hosts the scheduler
    std::uint64_t run = 0;                              // of the job; members of another one cannot rejoin
    std::chrono::milliseconds reunion_patience{12000};  // for members to rejoin, after the first one
  };

  struct Events {
    Calls::Send send;
    Tell tell = nullptr;                                                  // the same to many; null: by send
    std::function<void(const std::string& why)> on_lost;                  // a member
    std::function<void(const std::string& what)> on_suspended = nullptr;  // and when nobody has resumed it
    std::function<void()> on_over;                                        // before the members learn of it
    std::function<void(Peer)> close = nullptr;               // ends the connection of another peer than the caller
    std::function<void(std::uint32_t epoch)> on_epoch;       // of the view that who connects from here on will be in
    std::function<std::int64_t(Peer)> silence_ms = nullptr;  // since this peer was heard of last
  };

  Job(Options options, Events events);

  // False: this peer may not send that, or not now; the caller closes its connection.
  bool receive(Peer peer, Message&& message);
  // Tells all members who is gone since the last call. To be called soon after receive() and closed(): thousands may
  // leave at once, and all hear of all.
  void tell_departed();
  bool has_departed() const { return !departing_.nodes.empty(); }
  // The connection ended, or was closed by the scheduler.
  void closed(Peer peer, const std::string& why);
  // When the first of the waiting members gives up. Call give_up() then.
  std::optional<Clock::time_point> join_deadline() const;
  void give_up();

  // Null where the weights of servers do not change while the job runs. To be called a few times a second: look().
  LinkFollower* links() { return phase_.is<Running>() ? links_.get() : nullptr; }

  Phase phase() const { return phase_.name(); }
  // What SIGUSR1 shows of it, as JSON: the phase, its members, who waits for whom in a call, and the groups.
  std::string dump() const;
  // Once over: every worker left and nobody was lost.
  bool ended_well() const { return phase_.is<Over>() && phase_.in<Over>()->well; }
  // True when this peer waits for the others, is a member, or is what a member was in the view before.
  bool knows(Peer peer) const;
  std::uint32_t beat_ms() const;  // in which each member sends one heartbeat
  bool waits(Peer peer) const { return patience_.has(peer) || waits_for_resume(peer); }
  std::uint32_t epoch() const { return epoch_; }
  std::uint64_t lost() const { return lost_; }
  std::uint64_t refused() const { return refused_; }
  std::uint64_t declared() const { return calls_ ? calls_->declared() : 0; }
  std::uint64_t barriers() const { return calls_ ? calls_->barriers() : 0; }

 private:
  JsonObject describe() const;
  bool join(Peer peer, const Join& join);
  void gather(Peer peer, const Join& join);
  void stop_waiting(Peer peer, const std::string& why);
  bool rejoin(Peer peer, const Rejoin& report);
  void begin_reunion(Reunion&& reunion);
  void reunite();
  void start(Rendezvous::Seating seating);
  bool goes_on() const;
  void end_view(const std::string& why);
  void join_again(Peer peer, const Join& join);
  bool can_be_suspended() const;
  bool waits_for_resume(Peer peer) const;
  void suspend(bool well);
  void resume_server(Peer peer, const Join& join);
  void release_spare_servers(const std::vector<Peer>& seated);
  void give_up_suspended();
  void enter(Peer peer, const Join& join);
  void let_in();
  bool refuse_late();
  void lose(Member& member, const std::string& why);
  void begin_when_all_are_back();
  void gone(const Member& member);
  void refuse(Peer peer, const Refused& why);
  void finish(bool well);
  void leave(Member& member, const Leave& leave);
  bool suspect(const Member& from, const Suspect& about);
  void answer_suspicions(const Member& about);
  void end_view_of_broken(Member& from, Member& about);
  Member& choose_lost(Member& one, Member& other);
  bool have_all_left() const;
  void end_if_all_left();
  void depart(const Member& member, bool is_lost, const std::string& text, std::optional<std::uint32_t> call);
  void tell_here(const Message& message);
  void tell_all(const Message& message);

  const Options options_;
  const Events events_;
  JobPhase phase_;
  Patience patience_;                     // of those who wait for the others
  std::unique_ptr<MemberTable> members_;  // once running
  std::unique_ptr<Calls> calls_;
  std::unique_ptr<LinkFollower> links_;  // where servers may get other weights
  Inquiries inquiries_;
  Suspicions suspicions_;
  // Processes that wait for the end of a step, or of the view, to enter the job.
  std::vector<std::pair<Peer, Node>> entering_;
  // Those that are gone, whom not all know of yet.
  struct Departing {
    Departed news;
    std::vector<std::uint32_t> nodes;
    std::vector<std::pair<Peer, std::uint32_t>> calls;  // of those that leave
  };
  Departing departing_;
  std::uint32_t epoch_ = 1;
  bool is_whole_ = true;  // nobody of this view was lost, or left because of a loss
  std::uint64_t lost_ = 0;
  std::uint64_t refused_ = 0;
};

}  // namespace bps::van
