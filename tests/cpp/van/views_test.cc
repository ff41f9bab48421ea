// SPDX-License-Identifier: Apache-2.0
// From one view to the next, as the scheduler decides it: a job in which members die, leave and come again in every
// order, drawn by a seed. No sockets and no threads: the same seed gives the same run.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "van/job.h"

namespace bps::van {
namespace {

// A process as the scheduler sees it: it holds the connection of the view that it is in, and, from its Join to the
// welcome, that of the view to come.
struct Member {
  std::uint32_t pid = 0;
  bool alive = true;
  bool dedicated = false;  // a server that is no worker
  Peer peer = 0;           // in the view that it has been welcomed to
  Peer next = 0;           // waits for the next one
  Node node;               // in the view
  std::uint32_t epoch = 0;
  std::uint32_t expects = 0;  // of the view to come
  std::uint32_t workers = 0;
  bool told = false;                  // that the view has ended
  bool over = false;                  // it has been told that every worker has left
  std::optional<Refused> refused;     // of the next one
  std::vector<std::uint32_t> lost{};  // nodes that it has been told of, in this view
};

class Simulation {
 public:
  Simulation(std::uint32_t seed, std::uint32_t workers, std::uint32_t dedicated, std::uint32_t least)
      : random_(seed),
        job_(options(workers, dedicated, least),
             {.send = [this](Peer peer, const Message& message) { receive(peer, message); },
              .on_lost = nullptr,
              .on_over = nullptr,
              .on_epoch = [this](std::uint32_t epoch) { epoch_ = epoch; }}) {
    servers_inside_ = dedicated == 0;
    for (std::uint32_t i = 0; i < workers + dedicated; ++i) {
      Member& member = members_.emplace_back();
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
    EXPECT_TRUE(job_.receive(member.next, join));
    }
    deliver();
  }

  std::uint32_t draw(std::uint32_t below) {
    return std::uniform_int_distribution<std::uint32_t>(0, below - 1)(random_);
  }
  std::deque<Member>& members() { return members_; }
  Job& job() { return job_; }
  std::vector<Member*> alive() {
    std::vector<Member*> found;
    for (Member& member : members_) {
      if (member.alive) found.push_back(&member);
    }
    return found;
  }

  // All its connections end, in any order.
  void kill(Member& member) {
    member.alive = false;
    std::vector<Peer> peers{member.peer, member.next};
    if (draw(2) == 0) std::swap(peers[0], peers[1]);
    for (const Peer peer : peers) {
      if (peer != 0) job_.closed(peer, "killed");
    }
    deliver();
  }
  void leave(Member& member, const std::string& reason) {
    member.alive = false;
    (void)job_.receive(member.peer, Leave{.call = 1, .lost_node = 0, .reason = reason, .failure = ""});
    job_.closed(member.peer, "it has left");
    deliver();
  }
  void renew(Member& member) {
    connect(member);
    Join join{.node = node_of(member), .patience_ms = 1000, .renews = member.node.id};
    join.node.worker_rank = member.node.worker_rank;
    join.node.server_rank = member.node.server_rank;
    join.epoch = member.expects;
    EXPECT_TRUE(job_.receive(member.next, join));
    deliver();
  }
  // The scheduler's handshake tells the epoch.
  void connect(Member& member) {
    member.next = ++last_peer_;
    member.expects = epoch_;
  }
  // A new process asks to enter.
  Member& add(bool dedicated) {
    Member& member = members_.emplace_back();
    member.pid = 100 + static_cast<std::uint32_t>(members_.size());
    member.dedicated = dedicated;
    Join join{.node = node_of(member), .workers = 1, .servers = 1, .patience_ms = 1000};
    join.node.worker_rank = dedicated ? kNoRank : 0;
    join.node.server_rank = dedicated || servers_inside_ ? 0 : kNoRank;
    connect(member);
    join.epoch = member.expects;
    (void)job_.receive(member.next, join);
    deliver();
    return member;
  }
  // All workers come to the end of a step.
  void end_step() {
    for (Member& member : members_) {
      if (!member.alive || member.dedicated || member.epoch == 0 || member.told) continue;
      (void)job_.receive(member.peer, Barrier{.call = 7, .group = 0, .partition_bytes = 0, .ends_step = true});
    }
    deliver();
  }
  bool may_renew(const Member& member) const {
    return member.alive && member.told && member.next == 0 && !member.refused && !member.over;
  }

  // What Job has sent takes effect after it has returned, as on a network.
  void deliver() {
    while (!sent_.empty()) {
      const auto [peer, message] = sent_.front();
      sent_.erase(sent_.begin());
      const auto found =
          std::ranges::find_if(members_, [&](const Member& one) { return one.peer == peer || one.next == peer; });
      if (found == members_.end() || !found->alive) continue;
      take(*found, peer, message);
    }
  }

 private:
  static Job::Options options(std::uint32_t workers, std::uint32_t dedicated, std::uint32_t least) {
    Job::Options made;
    made.registry.workers = workers;
    made.registry.servers = dedicated == 0 ? workers : dedicated;
    made.min_workers = least;
    return made;
  }
  static Node node_of(const Member& member) {
    Node node;
    node.pid = member.pid;
    node.identity = member.pid;
    node.host = "host";
    node.worker_loops = member.dedicated ? 0 : 1;
    node.server_loops = 1;
    return node;
  }
  void receive(Peer peer, const Message& message) { sent_.emplace_back(peer, message); }

  void take(Member& member, Peer peer, const Message& message) {
    if (const auto* welcome = std::get_if<Welcome>(&message)) {
      ASSERT_EQ(peer, member.next) << "a welcome comes by the connection that asked for it";
      const Peer before = std::exchange(member.peer, std::exchange(member.next, 0));
      member.node = *welcome->membership.by_id(welcome->you);
      ASSERT_EQ(member.node.pid, member.pid);
      ASSERT_GT(welcome->membership.epoch, member.epoch);
      ASSERT_EQ(welcome->membership.epoch, member.expects) << "its listeners have the credentials of that view";
      member.epoch = welcome->membership.epoch;
      member.workers = welcome->membership.workers;
      member.told = false;
      member.lost.clear();
      ASSERT_TRUE(welcome->membership.is_consistent());
      if (before != 0) job_.closed(before, "it has come again");
    } else if (const auto* refused = std::get_if<Refused>(&message)) {
      ASSERT_EQ(peer, member.next);
      member.refused = *refused;
      member.next = 0;
    } else if (const auto* ended = std::get_if<ViewEnded>(&message)) {
      ASSERT_EQ(peer, member.peer);
      ASSERT_FALSE(member.told) << "told twice";
      ASSERT_GT(ended->epoch, member.epoch);
      member.told = true;
    } else if (std::holds_alternative<AllLeft>(message)) {
      member.over = true;
    } else if (const auto* lost = std::get_if<PeerLost>(&message)) {
      if (peer == member.peer) member.lost.push_back(lost->node);
    }
  }

  std::mt19937 random_;
  std::uint32_t epoch_ = 1;
  Job job_;
  Peer last_peer_ = 0;
  std::deque<Member> members_;
  bool servers_inside_ = false;
  std::vector<std::pair<Peer, Message>> sent_;
};

// All who are alive are in one view, in their old order.
void expect_one_view(Simulation& job) {
  const auto alive = job.alive();
  std::vector<std::int32_t> worker_ranks;
  std::vector<std::int32_t> server_ranks;
  for (const Member* member : alive) {
    EXPECT_EQ(member->epoch, alive.front()->epoch);
    EXPECT_FALSE(member->told);
    if (!member->dedicated) worker_ranks.push_back(member->node.worker_rank);
    if (member->node.server_rank >= 0) server_ranks.push_back(member->node.server_rank);
  }
  for (std::size_t i = 0; i < worker_ranks.size(); ++i) EXPECT_EQ(worker_ranks[i], static_cast<std::int32_t>(i));
  std::ranges::sort(server_ranks);
  for (std::size_t i = 0; i < server_ranks.size(); ++i) EXPECT_EQ(server_ranks[i], static_cast<std::int32_t>(i));
  for (const Member* member : alive) EXPECT_EQ(member->workers, worker_ranks.size());
}

void expect_end_for_all(Simulation& job) {
  for (Member* member : job.alive()) EXPECT_TRUE(member->refused || member->over || !member->told) << member->pid;
}

TEST(Views, SurvivorsCloseUpAndKeepTheirOrder) {
  Simulation job(1, 4, 0, 2);
  job.kill(job.members()[1]);
  for (const std::size_t i : {3, 0, 2}) {
    EXPECT_TRUE(job.members()[i].told);
    EXPECT_EQ(job.members()[i].lost, std::vector<std::uint32_t>{2}) << "by its number in the view that has ended";
    job.renew(job.members()[i]);
  }
  expect_one_view(job);
  EXPECT_EQ(job.members()[2].node.worker_rank, 1);
  EXPECT_EQ(job.members()[2].node.identity, 102);
  EXPECT_EQ(job.members()[2].epoch, 2);
}

TEST(Views, WithoutAMinimumALossEndsTheJob) {
  Simulation job(1, 3, 0, 0);
  job.kill(job.members()[1]);
  EXPECT_FALSE(job.members()[0].told);
  EXPECT_EQ(job.members()[0].lost, std::vector<std::uint32_t>{2});
}

TEST(Views, TooFewAreRefusedWithTheReason) {
  Simulation job(1, 3, 0, 2);
  job.kill(job.members()[0]);
  job.renew(job.members()[1]);
  job.kill(job.members()[2]);
  ASSERT_TRUE(job.members()[1].refused);
  EXPECT_EQ(job.members()[1].refused->code, ErrorCode::kPeerLost);
  EXPECT_NE(job.members()[1].refused->text.find("pid 100"), std::string::npos) << job.members()[1].refused->text;
}

TEST(Views, WhoComesTooLateIsNamed) {
  Simulation job(1, 3, 0, 1);
  job.kill(job.members()[0]);
  job.renew(job.members()[1]);
  ASSERT_TRUE(job.job().join_deadline());
  job.job().give_up();
  job.deliver();
  ASSERT_TRUE(job.members()[1].refused);
  EXPECT_EQ(job.members()[1].refused->code, ErrorCode::kTimeout);
  EXPECT_NE(job.members()[1].refused->text.find("pid 102"), std::string::npos) << job.members()[1].refused->text;
  job.renew(job.members()[2]);
  EXPECT_TRUE(job.members()[2].refused) << "it is not kept waiting for a view that cannot begin";
}

TEST(Views, AProcessThatWasNotInTheViewIsRefused) {
  Simulation job(1, 3, 0, 1);
  job.kill(job.members()[0]);
  Member& impostor = job.members()[0];
  impostor.alive = true;  // the dead one's number
  impostor.peer = 0;
  job.renew(impostor);
  ASSERT_TRUE(impostor.refused);
  EXPECT_EQ(job.job().phase(), Job::Phase::kRenewing);
}

TEST(Views, ANewProcessEntersAtTheEndOfAStep) {
  Simulation job(1, 2, 0, 1);
  Member& entering = job.add(false);
  EXPECT_FALSE(job.members()[0].told) << "in the middle of a step";
  job.end_step();
  for (const std::size_t i : {1, 0}) {
    EXPECT_TRUE(job.members()[i].told);
    job.renew(job.members()[i]);
  }
  expect_one_view(job);
  EXPECT_EQ(entering.node.worker_rank, 2) << "after the others";
  EXPECT_EQ(entering.epoch, 2);
  EXPECT_EQ(job.members()[1].node.worker_rank, 1);
}

TEST(Views, ANewProcessTakesThePlaceOfALostOne) {
  Simulation job(1, 3, 0, 1);
  job.kill(job.members()[0]);
  Member& entering = job.add(false);
  job.renew(job.members()[2]);
  job.renew(job.members()[1]);
  expect_one_view(job);
  EXPECT_EQ(entering.node.worker_rank, 2);
  EXPECT_EQ(job.members()[1].node.worker_rank, 0);
}

TEST(Views, ANewServerEntersAtOnce) {
  Simulation job(1, 2, 1, 1);
  Member& entering = job.add(true);
  EXPECT_TRUE(job.members()[0].told);
  for (std::size_t i = 0; i < 3; ++i) job.renew(job.members()[i]);
  expect_one_view(job);
  EXPECT_EQ(entering.node.server_rank, 1);
}

// Deaths, departures, entries and returns in any order: at the end all who live are in one view, or all know that there
// is none.
TEST(Views, AnyOrderOfEventsEndsWellOrForAll) {
  int renewed = 0;
  int refused = 0;
  for (std::uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 generator(seed);
    const auto shape = [&](std::uint32_t below) { return static_cast<std::uint32_t>(generator() % below); };
    const std::uint32_t workers = 2 + shape(5);
    const std::uint32_t dedicated = shape(3);
    Simulation job(seed, workers, dedicated, 1 + shape(workers));
    for (int i = 0; i < 12; ++i) {
      const auto alive = job.alive();
      if (alive.empty() || job.job().phase() == Job::Phase::kOver) break;
      Member& member = *alive[job.draw(static_cast<std::uint32_t>(alive.size()))];
      switch (job.draw(8)) {
        case 6: job.end_step(); break;
        case 7:
          if (job.draw(2) == 0) job.add(dedicated > 0 && job.draw(2) == 0);
          break;
        case 0: job.kill(member); break;
        case 1:
          if (member.next == 0 && job.draw(3) == 0) job.leave(member, job.draw(2) == 0 ? "" : "ValueError");
          break;
        default:
          if (job.may_renew(member)) job.renew(member);
      }
    }
    for (int i = 0; i < 3; ++i) {
      for (Member* member : job.alive()) {
        if (job.may_renew(*member)) job.renew(*member);
      }
    }
    const bool over = std::ranges::any_of(job.alive(), [](const Member* one) { return one->refused.has_value(); });
    const bool ended = job.job().phase() == Job::Phase::kOver;
    if (over || ended) {
      refused += over;
      expect_end_for_all(job);
    } else if (std::ranges::any_of(job.alive(), [](const Member* one) { return one->epoch > 1; })) {
      ++renewed;
      // Who has left without a reason is missed by nobody until the next loss.
      if (job.job().phase() == Job::Phase::kRunning) {
        for (const Member* member : job.alive()) EXPECT_FALSE(member->told);
      }
    }
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_GT(renewed, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace bps::van
