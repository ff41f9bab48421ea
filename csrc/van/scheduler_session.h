// SPDX-License-Identifier: Apache-2.0
// The connection to the scheduler, and everything else that runs on the van's thread.
//
// Threading: post() and the waiting functions may be called from any thread, the rest belongs to the van's thread. What
// is told at the welcome (membership, self) never changes afterwards.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "van/connection.h"
#include "van/find_scheduler.h"
#include "van/pending_calls.h"
#include "van/scheduler_search.h"
#include "van/van.h"

namespace bps::van {

class SchedulerSession {
 public:
  enum class End : std::uint8_t { kNotYet, kWell, kBadly, kSchedulerLost, kViewEnded };
  struct Options {
    double heartbeat_interval_s;
    double heartbeat_timeout_s;
    bool outlives_scheduler;  // see VanOptions
    double scheduler_patience_s;
    SchedulerSearch::Find find;
  };

  SchedulerSession(VanEvents events, Options options);
  ~SchedulerSession();
  SchedulerSession(const SchedulerSession&) = delete;
  SchedulerSession& operator=(const SchedulerSession&) = delete;

  EventLoop& loop() { return loop_; }
  PendingCalls& calls() { return calls_; }

  // From any thread.
  void open(FoundScheduler scheduler, Join join);
  void hang_up();
  // The process has joined the view that follows the one that has ended, by another session.
  void retire();
  void post(const Message& message);
  // A call, which another scheduler has to know of if it has not been answered by then.
  void ask(PendingCalls::Call& call, const Message& message);
  // This node leaves the job: the scheduler is told, now or as soon as there is one.
  void leave(const Leave& message);
  void suspect(std::uint32_t node, const std::string& why);
  bool joined() const { return joined_; }
  Clock::time_point heard() const { return Clock::time_point(Duration(heard_ns_)); }
  const Membership& membership() const { return membership_; }  // once joined
  const Node& self() const { return *self_; }                   // once joined
  // Lets wait_for_end() return kBadly.
  void give_up() { end(End::kBadly, ""); }
  End end_so_far();
  bool view_ended() const { return view_ended_; }
  // Of a view whose workers have suspended the job: how long the next one may take to begin; 0: they have not.
  std::uint32_t resume_patience_ms() const { return resume_patience_ms_; }
  // kNotYet when the deadline passed first.
  End wait_for_end(const Deadline& deadline);
  // Why the view, or the job, has ended.
  std::string why_lost();
  // How the scheduler was lost, also where this node goes on, or looks for another one; or nothing.
  std::string why_scheduler_lost();
  // Whether it looks for another scheduler.
  bool is_away() const { return is_away_; }
  // Node and text of the first loss; an empty text: none so far.
  std::pair<std::uint32_t, std::string> first_loss();

 private:
  void run();
  void receive(Message&& message);
  void welcome(Welcome&& welcome);
  void learn(const Group& group);
  void note_group(const GroupReady& ready);
  void end_view(const std::string& why);
  void lose(std::uint32_t node, const std::string& why);
  void lose_scheduler(const std::string& why);
  void expel(const std::string& why);
  void connect(FoundScheduler&& scheduler);
  void search(const std::string& why);
  void come_back(FoundScheduler&& scheduler);
  Rejoin what_is_known();
  void give_up_search();
  void go_on_alone(const std::string& why);
  void end_if_unused();
  void answer_suspicion(std::uint32_t node);
  void end(End how, const std::string& why);
  void beat();
  void send_heartbeat();

  const VanEvents events_;
  const Options options_;
  EventLoop loop_;
  PendingCalls calls_;
  std::unique_ptr<Connection> connection_;
  std::uint64_t connections_ = 0;  // that there have been
  std::string where_;
  Membership membership_;
  const Node* self_ = nullptr;
  Duration silence_{0};  // after which the scheduler counts as lost
  double beat_s_ = 0;    // between heartbeats
  Timer heartbeat_;
  Clock::time_point last_beat_;
  Timer next_try_;  // to send a heartbeat that is held back
  Clock::time_point last_proof_;
  bool warned_ = false;  // of the heartbeats that are held back now
  std::set<std::uint32_t> lost_;
  std::string alone_;  // how the scheduler was lost that this node has outlived; or nothing
  // For a scheduler in the place of this one:
  std::unique_ptr<SchedulerSearch> search_;  // while there is none
  bool retired_ = false;
  std::string why_away_;                             // how the last one was lost
  std::uint64_t run_ = 0;                            // of the job
  std::map<std::uint32_t, std::uint64_t> barriers_;  // that have ended, by group
  std::vector<Rejoin::Made> groups_;
  std::vector<std::uint32_t> left_;  // nodes that have left the job
  std::string last_left_;            // as a sentence
  std::optional<Leave> leave_;
  std::map<std::uint32_t, std::string> suspected_;  // why, until the scheduler has told what it knows

  std::atomic<bool> joined_{false};
  std::atomic<Duration::rep> heard_ns_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> view_ended_{false};
  std::atomic<std::uint32_t> resume_patience_ms_{0};
  std::atomic<bool> is_away_{false};
  std::mutex mutex_;
  std::condition_variable ended_;
  End end_ = End::kNotYet;                            // guarded by mutex_
  std::string why_lost_;                              // guarded by mutex_
  std::string why_alone_;                             // guarded by mutex_: alone_ or why_away_, for other threads
  std::pair<std::uint32_t, std::string> first_loss_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace bps::van
