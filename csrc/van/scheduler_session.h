// SPDX-License-Identifier: Apache-2.0
// Keeps the connection to the scheduler, and does everything else that runs on the van's thread. docs/notes/members.md
// "When the scheduler is lost" has the diagram of its states.
//
// Threading: post() and the waiting functions may be called from any thread, the rest belongs to the van's thread. What
// is told at the welcome (membership, self) never changes afterwards.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "core/state.h"
#include "van/heartbeats.h"
#include "van/peer_suspicions.h"
#include "van/pending_calls.h"
#include "van/rejoin_report.h"
#include "van/scheduler_line.h"
#include "van/scheduler_search.h"
#include "van/session_end.h"
#include "van/van_events.h"

namespace bps::van {

enum class SessionState : std::uint8_t {
  kJoining,
  kJoined,
  kSearching,  // the scheduler is lost, and another one in its place is looked for
  kAlone,      // the scheduler is lost, and this node goes on without one
  kExpelled,   // the job goes on without this node, if at all
  kRetired,    // the process is in the next view, by another session
};
constexpr const char* name_of(SessionState) {
  return "a session with the scheduler";
}
constexpr std::array<std::uint16_t, 6> arrows_of(SessionState) {
  return {
      arrows_to(SessionState::kJoined, SessionState::kRetired),
      arrows_to(SessionState::kSearching, SessionState::kAlone, SessionState::kExpelled, SessionState::kRetired),
      arrows_to(SessionState::kJoined, SessionState::kAlone, SessionState::kExpelled, SessionState::kRetired),
      arrows_to(SessionState::kRetired),
      arrows_to(SessionState::kRetired),
      arrows_to(),
  };
}

class SchedulerSession {
 public:
  using End = SessionEnd::How;
  struct Options {
    double heartbeat_timeout_s;
    bool outlives_scheduler;  // see VanOptions
    double scheduler_patience_s;
    SchedulerSearch::Find find;
  };

  SchedulerSession(VanEvents events, Options options);
  ~SchedulerSession();
  SchedulerSession(const SchedulerSession&) = delete;
  SchedulerSession& operator=(const SchedulerSession&) = delete;

  PendingCalls& calls() { return calls_; }
  // Tells how the session has ended so far. Any thread may ask, and wait.
  SessionEnd& end() { return end_; }

  // ---- Any thread may call these
  void open(FoundScheduler scheduler, Join join);
  void hang_up();
  // To be called when the process has joined the next view, by another session.
  void retire();
  void post(const Message& message);
  // Sends a call. If it has no answer when the scheduler is lost, the next scheduler is told of it.
  void ask(PendingCalls::Call& call, const Message& message);
  // Tells the scheduler that this node leaves the job, now or as soon as there is one.
  void leave(const Leave& message);
  void suspect(std::uint32_t node, const std::string& why);
  bool joined() const { return !state_.is(SessionState::kJoining); }
  Clock::time_point heard() const { return line_.heard(); }
  const Membership& membership() const { return seat_.membership; }  // once joined
  const Node& self() const { return *seat_.self; }                   // once joined
  // Returns true while the session looks for another scheduler.
  bool is_away() const { return state_.is(SessionState::kSearching); }

 private:
  // Holds what the scheduler tells at the welcome.
  struct Seat {
    Membership membership;
    const Node* self = nullptr;
    Duration silence{0};  // after which the scheduler counts as lost
  };

  void run();
  // ---- What the scheduler says
  void receive(Message&& message);
  bool receive_news(const Message& message);
  void receive_answer(Message&& message);
  void note_departed(const Departed::Member& member);
  void welcome(Welcome&& welcome);
  void learn(const Group& group);
  void end_view(const ViewEnded& ended);
  // ---- Losses
  void lose(std::uint32_t node, const std::string& why);
  void answer_suspicion(std::uint32_t node);
  void on_beat(bool was_stopped);
  void lose_scheduler(const std::string& why);
  void search(const std::string& why);
  void give_up_search(std::string why);
  void come_back(FoundScheduler&& scheduler);
  void go_on_alone(const std::string& why);
  void expel(const std::string& why);
  void finish(End how, const std::string& why);

  const VanEvents events_;
  const Options options_;
  EventLoop loop_;
  PendingCalls calls_;
  SchedulerLine line_;
  std::uint64_t identity_ = 0;
  Seat seat_;
  std::optional<Heartbeats> heartbeats_;  // once joined
  PeerSuspicions peers_;
  RejoinReport report_;
  std::unique_ptr<SchedulerSearch> search_;  // in kSearching only
  State<SessionState, std::atomic<SessionState>> state_;
  std::atomic<bool> stopping_{false};
  SessionEnd end_;
  std::thread thread_;
};

}  // namespace bps::van
