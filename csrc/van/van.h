// SPDX-License-Identifier: Apache-2.0
// Connects a process to the scheduler: joining, barriers, declaring tensors, groups, heartbeats, leaving.
//
// A van belongs to one view; in the next one the process has another.
//
// Threading: the van has a thread of its own, which tells the process (van_events.h). Public calls come from
// application threads, block up to their time-out without spinning, can be interrupted (core/interrupt.h), and throw
// Error. Once a peer or the scheduler is lost, or has left, calls that need it throw kPeerLost and name it. With
// VanOptions::outlives_scheduler the loss of the scheduler concerns these calls only.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "transport/handshake.h"
#include "van/membership.h"
#include "van/messages.h"
#include "van/session_end.h"
#include "van/van_events.h"

namespace bps::van {

struct VanOptions {
  std::string scheduler_host = "127.0.0.1";
  std::string scheduler_hint{};  // what to check if it is not found, see find_scheduler()
  Origin origin{};
  std::vector<std::uint16_t> scheduler_ports;  // tried in turn, over and over: the one that answers for our job wins
  double join_timeout_s = 60;
  double heartbeat_timeout_s = 1.5;  // silence after which the scheduler counts as lost; its own, if that is longer
  double call_timeout_s = 60;        // declare, new_group
  std::uint32_t renews = 0;          // the id of this node in the view that has ended; 0: it is new
  // The process goes on without a scheduler that is dead or silent, and on_lost does not hear of it. It does not go on
  // without a scheduler that has said that this node is out, or that has ended the view.
  bool outlives_scheduler = false;
  // Before that the process waits so long for a scheduler to be started in the place of the lost one, at the same
  // address; 0: it does not wait. The new scheduler ends the view, and begins the next one.
  double scheduler_patience_s = 0;
};

class SchedulerSession;
struct FoundScheduler;
struct WaitingCall;

class Van {
 public:
  // Starts the van's thread; nothing is sent before join().
  Van(VanOptions options, transport::Credentials credentials, VanEvents events);
  ~Van();
  Van(const Van&) = delete;
  Van& operator=(const Van&) = delete;

  const VanOptions& options() const { return options_; }
  // Joins the job. Both ranks of `self` are the wanted rank, kAnyRank, or kNoRank. Returns when all have joined. Throws
  // kUnreachable, kAuthentication, kVersion, kMismatch (rank taken, counts differ), kTimeout (says how many are
  // missing), kPeerLost (the job goes on without this node, or not at all).
  void join(const Node& self, std::uint32_t workers, std::uint32_t servers);
  bool joined() const;
  const Membership& membership() const;
  const Node& self() const;
  // Returns true when other workers have state of the job and this one has not: it has entered, and has not yet ended a
  // step with all workers.
  bool is_late() const;

  // Waits until all ranks of the group are here. Before they declare anything, all workers also agree here on the size
  // of partitions: each may wish for at most so many bytes (0: no wish). Returns the smallest wish of all, or 0.
  std::uint64_t barrier(const Group& group, double timeout_s, std::uint64_t partition_bytes = 0);
  // Does the same at the end of a step, when nothing is under way. The view may end there for a process that wants to
  // enter.
  void end_step(const Group& group, double timeout_s);
  // Declares any number of tensors in one round trip. Throws kMismatch naming tensor, ranks and both shapes.
  std::vector<TensorId> declare(std::span<const TensorSpec> tensors);
  // Makes a group; the same ranks and name give the same one. Every rank of the group calls this. It returns once all
  // servers know the group.
  Group new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s);

  // To be called, by any thread, when a connection to this node broke. The scheduler is asked what became of the node.
  // on_lost then names the first cause, which is that connection only if the node is still running.
  void suspect(std::uint32_t node, const std::string& why);
  // To be called, by any thread, when this node is silent although the connection to it is open. If the scheduler loses
  // the node, on_lost follows as always; if the scheduler hears it, on_reachable.
  void inquire(std::uint32_t node);
  // Sends a message to which no answer is expected. Any thread may call it.
  void tell(const Message& message);

  // Leaves the job, and waits until every worker has left. Returns false when that took too long; throws kPeerLost as
  // soon as the scheduler is lost. The scheduler hears of the loss that made this process leave, if there was one. A
  // van that is destroyed without leaving counts as lost. Calls that other threads wait in, and later ones, fail with
  // kNotInitialized.
  //
  // `failure` says how the last operation failed, or nothing. Those who wait for this process in vain are told of it.
  // `suspends` says that workers are going to come back, this one or others. Dedicated servers then wait for them.
  bool leave(double timeout_s, const std::string& failure = "", bool suspends = false);
  // Does the first half of leave(): returns when those who wait for this process are being told.
  void announce_leaving(double timeout_s, const std::string& failure);
  // Leaves the job because this process ends with `exception` ("ValueError: no such file"), which all members are told.
  // It waits only until the scheduler has heard it, for a second at most.
  void abort(const std::string& exception);
  // Blocks a server until every worker has left, the job is lost, or the view has ended. Returns true when it ended
  // well.
  bool wait_for_end();
  // Lets wait_for_end() return.
  void give_up();
  // Tells how the job, the view or the connection to the scheduler has ended so far.
  const SessionEnd& end() const;
  // To be called when the process has joined the next view by another van. This one then needs the scheduler no more.
  void retire();

  // Returns true when the scheduler is lost, and this node waits for one in its place.
  bool awaits_scheduler() const;
  std::vector<WaitingCall> waiting_calls() const;
  // Returns when the scheduler was heard last, or a time long ago before it was heard at all.
  Clock::time_point heard() const;

 private:
  std::uint64_t barrier(const Group& group, double timeout_s, std::uint64_t partition_bytes, bool ends_step);
  void say_goodbye(std::string exception, std::string failure, bool suspends, const Deadline& deadline);
  FoundScheduler find(const Deadline& deadline) const;
  bool try_to_join(const Node& self, std::uint32_t workers, std::uint32_t servers, const Deadline& deadline);

  const VanOptions options_;
  const transport::Credentials credentials_;
  std::atomic<bool> left_{false};
  std::atomic<bool> has_ended_step_{false};  // with all workers
  const std::unique_ptr<SchedulerSession> session_;
};

}  // namespace bps::van
