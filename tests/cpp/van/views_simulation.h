// SPDX-License-Identifier: Apache-2.0
// Simulates a job as its scheduler decides it, with members that die, leave and come again in an order drawn by a seed,
// and schedulers that take each other's place. There are no sockets and no threads: the same seed gives the same run.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "van/job.h"

namespace bps::van::test {

// Describes a process as the scheduler sees it: it holds the connection of the view that it is in, and, from its Join
// to the welcome, that of the view to come.
struct SimulatedMember {
  std::uint32_t pid = 0;
  bool alive = true;
  bool dedicated = false;  // a server that is no worker
  Peer peer = 0;           // the connection in the view that it has been welcomed to
  Peer next = 0;           // the connection that waits for the next one
  Node node;               // what it is in the view
  std::uint32_t epoch = 0;
  std::uint32_t expects = 0;  // the epoch of the view to come
  std::uint32_t workers = 0;
  Membership membership{};                         // that of its view
  bool told = false;                               // it knows that the view has ended
  std::uint64_t schedulers = 0;                    // how many schedulers there had been when it was told
  std::uint64_t ended = 0;                         // steps that have ended, in this view
  bool waits = false;                              // waits for the end of a step
  std::map<std::uint32_t, std::uint64_t> steps{};  // steps that had ended when a view was over, by its epoch
  bool over = false;                               // it has been told that every worker has left
  std::optional<Refused> refused;                  // the next view has refused it
  std::vector<std::uint32_t> lost{};               // lost nodes that it has been told of, in this view
};

class Simulation {
 public:
  Simulation(std::uint32_t seed, std::uint32_t workers, std::uint32_t dedicated, std::uint32_t least)
      : random_(seed), options_(options(workers, dedicated, least)), servers_inside_(dedicated == 0) {
    start_scheduler();
    for (std::uint32_t i = 0; i < workers + dedicated; ++i) {
      SimulatedMember& member = members_.emplace_back();
      member.pid = 100 + i;
      member.dedicated = i >= workers;
      Join join{.node = node_of(member),
                .workers = workers,
                .servers = dedicated == 0 ? workers : dedicated,
                .patience_ms = 1000};
      join.node.worker_rank = member.dedicated ? kNoRank : static_cast<std::int32_t>(i);
      join.node.server_rank = member.dedicated || dedicated == 0 ? kAnyRank : kNoRank;
      connect(member);
      join.epoch = member.expects;
      EXPECT_TRUE(job_->receive(member.next, join));
    }
    deliver();
  }

  std::uint32_t draw(std::uint32_t below) {
    return std::uniform_int_distribution<std::uint32_t>(0, below - 1)(random_);
  }
  std::deque<SimulatedMember>& members() { return members_; }
  Job& job() { return *job_; }
  std::vector<SimulatedMember*> alive() {
    std::vector<SimulatedMember*> found;
    for (SimulatedMember& member : members_) {
      if (member.alive) found.push_back(&member);
    }
    return found;
  }

  // Ends all connections of the member, in any order.
  void kill(SimulatedMember& member) {
    member.alive = false;
    std::vector<Peer> peers{member.peer, member.next};
    if (draw(2) == 0) std::swap(peers[0], peers[1]);
    for (const Peer peer : peers) {
      if (peer != 0) job_->closed(peer, "killed");
    }
    deliver();
  }
  void leave(SimulatedMember& member, const std::string& reason, bool suspends = false) {
    member.alive = false;
    (void)job_->receive(member.peer,
                        Leave{.call = 1, .lost_node = 0, .reason = reason, .failure = "", .suspends = suspends});
    job_->closed(member.peer, "it has left");
    deliver();
  }
  void renew(SimulatedMember& member) {
    connect(member);
    Join join{.node = node_of(member), .patience_ms = 1000, .renews = member.node.id};
    join.node.worker_rank = member.node.worker_rank;
    join.node.server_rank = member.node.server_rank;
    join.epoch = member.expects;
    if (!job_->receive(member.next, join)) member.next = 0;  // its connection was closed: it tries again
    deliver();
  }
  // Lets the member try again whose connection was closed without a word.
  void try_again(Peer peer) {
    for (SimulatedMember& member : members_) {
      if (member.next == peer) member.next = 0;
    }
  }
  // Opens a connection, in whose handshake the scheduler tells the epoch.
  void connect(SimulatedMember& member) {
    member.next = ++last_peer_;
    member.expects = epoch_;
  }
  // Starts a new process that asks to enter.
  SimulatedMember& add(bool dedicated, std::chrono::milliseconds patience = std::chrono::seconds(1)) {
    SimulatedMember& member = members_.emplace_back();
    member.pid = 100 + static_cast<std::uint32_t>(members_.size());
    member.dedicated = dedicated;
    Join join{.node = node_of(member), .workers = 1, .servers = 1, .patience_ms = 1000};
    join.patience_ms = static_cast<std::uint32_t>(patience.count());
    join.node.worker_rank = dedicated ? kNoRank : 0;
    join.node.server_rank = dedicated || servers_inside_ ? 0 : kNoRank;
    connect(member);
    join.epoch = member.expects;
    (void)job_->receive(member.next, join);
    deliver();
    return member;
  }
  // Starts a process that resumes a suspended job, or takes part in it from there on. With kNoRank it is a dedicated
  // server.
  SimulatedMember& resume(std::int32_t rank, std::uint32_t workers, std::uint32_t servers) {
    SimulatedMember& member = members_.emplace_back();
    member.pid = 100 + static_cast<std::uint32_t>(members_.size());
    member.dedicated = rank == kNoRank;
    Join join{.node = node_of(member), .workers = workers, .servers = servers, .patience_ms = 1000};
    join.node.worker_rank = rank;
    join.node.server_rank = member.dedicated || servers_inside_ ? kAnyRank : kNoRank;
    connect(member);
    join.epoch = member.expects;
    if (!job_->receive(member.next, join)) member.next = 0;
    deliver();
    return member;
  }
  // Lets all workers come to the end of a step.
  void end_step() {
    for (SimulatedMember& member : members_) {
      if (!member.alive || member.dedicated || member.epoch == 0 || member.told || member.waits) continue;
      member.waits = true;
      (void)job_->receive(member.peer, kEndOfStep);
    }
    deliver();
  }

  // ---- The scheduler

  // Lets only so many messages arrive of what the scheduler sends from now on. Then it is dead.
  void let_scheduler_die(std::size_t messages) { messages_left_ = messages; }
  // Starts the next scheduler, which knows the run of the job, and nothing else.
  void replace_scheduler() {
    sent_.clear();
    messages_left_.reset();
    start_scheduler();
    ++schedulers_;
    for (SimulatedMember& member : members_) {
      member.peer = member.next = 0;
      if (member.epoch == 0) member.alive = false;  // the member had not entered yet
    }
  }
  bool may_rejoin(const SimulatedMember& member) const {
    return member.alive && member.peer == 0 && member.epoch > 0 && !member.refused && !member.over;
  }
  void rejoin(SimulatedMember& member) {
    member.peer = ++last_peer_;
    Rejoin report;
    report.run = kRun;
    report.you = member.node.id;
    report.membership = member.membership;
    report.barriers = {{0, member.ended}};
    if (member.waits) report.waiting_barriers = {kEndOfStep};
    if (!job_->receive(member.peer, report)) {  // the job has closed the connection, for as long as the member may try
      EXPECT_EQ(job_->phase(), Job::Phase::kOver);
      member.over = true;
    }
    deliver();
  }
  // Ends the reunion: those who have not come by now are lost.
  void end_reunion() {
    if (job_->phase() == Job::Phase::kReuniting) job_->give_up();
    deliver();
  }
  // Returns by view how many steps the workers have ended in it that are in the job yet. They should all say the same.
  std::map<std::uint32_t, std::set<std::uint64_t>> steps() const {
    std::map<std::uint32_t, std::set<std::uint64_t>> found;
    for (const SimulatedMember& member : members_) {
      if (!member.alive || member.refused) continue;
      for (const auto& [epoch, ended] : member.steps) found[epoch].insert(ended);
    }
    return found;
  }

  bool may_renew(const SimulatedMember& member) const {
    return member.alive && member.told && member.next == 0 && !member.refused && !member.over;
  }

  // Delivers what Job has sent, which takes effect after Job has returned, as on a network.
  void deliver() {
    for (;;) {
      job_->tell_departed();
      if (sent_.empty()) return;
      if (messages_left_ && (*messages_left_)-- == 0) return replace_scheduler();
      const Peer peer = sent_.front().first;
      const Message message = std::move(sent_.front().second);
      sent_.erase(sent_.begin());
      const auto found = std::ranges::find_if(
          members_, [&](const SimulatedMember& one) { return one.peer == peer || one.next == peer; });
      if (found == members_.end() || !found->alive) continue;
      take(*found, peer, message);
    }
  }

 private:
  static Job::Options options(std::uint32_t workers, std::uint32_t dedicated, std::uint32_t least) {
    Job::Options made;
    made.registry.workers = workers;
    made.registry.servers = dedicated == 0 ? workers : dedicated;
    made.terms.min_workers = least;
    made.run = kRun;
    made.resume_timeout = std::chrono::minutes(10);
    return made;
  }
  Node node_of(const SimulatedMember& member) const {
    Node node;
    node.pid = member.pid;
    node.identity = member.pid;
    node.host = "host";
    node.worker_loops = member.dedicated ? 0 : 1;
    node.server_loops = 1;
    node.terms = options_.terms;
    return node;
  }
  void receive(Peer peer, const Message& message) { sent_.emplace_back(peer, message); }

  void take(SimulatedMember& member, Peer peer, const Message& message) {
    if (const auto* welcome = std::get_if<Welcome>(&message)) {
      ASSERT_EQ(peer, member.next) << "a welcome comes by the connection that asked for it";
      const Peer before = std::exchange(member.peer, std::exchange(member.next, 0));
      member.node = *welcome->membership.find(member.pid);
      ASSERT_GT(welcome->membership.epoch, member.epoch);
      ASSERT_EQ(welcome->membership.epoch, member.expects) << "its listeners have the credentials of that view";
      member.epoch = welcome->membership.epoch;
      member.membership = welcome->membership;
      member.ended = 0;
      member.waits = false;
      member.workers = welcome->membership.workers;
      member.told = false;
      member.lost.clear();
      ASSERT_TRUE(welcome->membership.is_consistent());
      if (before != 0) job_->closed(before, "it has come again");
    } else if (const auto* refused = std::get_if<Refused>(&message)) {
      member.refused = *refused;
      member.next = 0;
    } else if (std::holds_alternative<Done>(message)) {
      ASSERT_TRUE(member.waits);
      member.waits = false;
      ++member.ended;
    } else if (const auto* ended = std::get_if<ViewEnded>(&message)) {
      ASSERT_EQ(peer, member.peer);
      ASSERT_FALSE(ended->patience_ms == 0 && member.told && member.schedulers == schedulers_) << "told twice";
      ASSERT_GT(ended->epoch, member.epoch);
      if (!member.dedicated) member.steps[member.epoch] = member.ended;
      member.told = true;
      member.schedulers = schedulers_;
    } else if (std::holds_alternative<AllLeft>(message)) {
      member.over = true;
    } else if (const auto* departed = std::get_if<Departed>(&message)) {
      for (const Departed::Member& one : departed->members) {
        if (peer == member.peer && one.is_lost && one.node != member.node.id) member.lost.push_back(one.node);
      }
    }
  }

  void start_scheduler() {
    epoch_ = 1;
    job_ = std::make_unique<Job>(
        options_, Job::Events{.send = [this](Peer peer, const Message& message) { receive(peer, message); },
                              .on_lost = nullptr,
                              .on_over = nullptr,
                              .close = [this](Peer peer) { try_again(peer); },
                              .on_epoch = [this](std::uint32_t epoch) { epoch_ = epoch; },
                              .silence_ms = [](Peer) { return std::int64_t{0}; }});
  }

  static constexpr std::uint64_t kRun = 77;
  static constexpr Barrier kEndOfStep{.call = 7, .group = 0, .partition_bytes = 0, .ends_step = true};

  std::mt19937 random_;
  const Job::Options options_;
  const bool servers_inside_;
  std::uint32_t epoch_ = 1;
  std::unique_ptr<Job> job_;
  std::uint64_t schedulers_ = 1;
  std::optional<std::size_t> messages_left_;
  Peer last_peer_ = 0;
  std::deque<SimulatedMember> members_;
  std::vector<std::pair<Peer, Message>> sent_;
};

}  // namespace bps::van::test
