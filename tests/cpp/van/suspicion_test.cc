// SPDX-License-Identifier: Apache-2.0
// A member says that its connection to another one broke: what the scheduler tells it of that one, and when.
#include <gtest/gtest.h>

#include <thread>
#include <utility>
#include <vector>

#include "van/job.h"

namespace bps::van {
namespace {

class Suspicions : public testing::Test {
 protected:
  static constexpr std::uint32_t kSuspected = 2;  // the node of peer 2

  Suspicions() {
    for (Peer peer = 1; peer <= 2; ++peer) {
      Join join{.node = {}, .workers = 2, .servers = 2, .patience_ms = 1000};
      join.node.worker_rank = join.node.server_rank = static_cast<std::int32_t>(peer) - 1;
      join.node.worker_loops = join.node.server_loops = 1;
      join.node.pid = static_cast<std::uint32_t>(peer);
      EXPECT_TRUE(job_.receive(peer, join));
    }
    sent_.clear();
  }

  template <typename Kind>
  bool was_told() const {
    for (const auto& [peer, message] : sent_) {
      if (peer == 1 && std::holds_alternative<Kind>(message)) return true;
    }
    return false;
  }

  static Job::Options options() {
    Job::Options made;
    made.registry.workers = made.registry.servers = 2;
    return made;
  }

  std::vector<std::pair<Peer, Message>> sent_;
  Job job_{options(),
           {.send = [this](Peer peer, const Message& message) { sent_.emplace_back(peer, message); },
            .on_lost = nullptr,
            .on_over = nullptr,
            .close = nullptr,
            .on_epoch = nullptr}};
};

TEST_F(Suspicions, AMemberThatGoesOnIsReachable) {
  ASSERT_TRUE(job_.receive(1, Suspect{kSuspected}));
  EXPECT_FALSE(was_told<Reachable>());
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  ASSERT_TRUE(job_.receive(2, Reply{}));
  ASSERT_TRUE(job_.receive(2, GroupAck{1}));
  EXPECT_FALSE(was_told<Reachable>()) << "of one thread; another may be stopped";
  ASSERT_TRUE(job_.receive(2, Heartbeat{}));
  EXPECT_TRUE(was_told<Reachable>());
}

// The scheduler was busy, and reads the heartbeat and the end of the connection after the suspicion.
TEST_F(Suspicions, AHeartbeatFromBeforeItsDeathProvesNothing) {
  ASSERT_TRUE(job_.receive(1, Suspect{kSuspected}));
  ASSERT_TRUE(job_.receive(2, Heartbeat{}));
  EXPECT_FALSE(was_told<Reachable>());
  job_.closed(2, "connection closed");
  job_.tell_departed();
  EXPECT_FALSE(was_told<Reachable>());
  EXPECT_TRUE(was_told<Departed>());
}

// Thousands leave or are lost at once: all hear of all of them in one message, and no member has its reply before.
TEST_F(Suspicions, WhoIsGoneIsToldTogether) {
  ASSERT_TRUE(job_.receive(1, Leave{7, 0, "", "", false}));
  job_.closed(2, "connection closed");
  EXPECT_TRUE(sent_.empty());
  job_.tell_departed();
  ASSERT_GE(sent_.size(), 2U);
  const auto* departed = std::get_if<Departed>(&sent_[0].second);
  ASSERT_NE(departed, nullptr);
  ASSERT_EQ(departed->members.size(), 2U);
  EXPECT_EQ(departed->members[0].node, 1U);
  EXPECT_FALSE(departed->members[0].is_lost);
  EXPECT_EQ(departed->members[1].node, 2U);
  EXPECT_TRUE(departed->members[1].is_lost);
  EXPECT_EQ(sent_[1], (std::pair<Peer, Message>(1, Done{.call = 7})));
  sent_.clear();
  job_.tell_departed();
  EXPECT_TRUE(sent_.empty()) << "once";
}

// It was silent for a while, and answers again.
TEST_F(Suspicions, AMemberThatLeavesAsItShouldIsReachableOnceItIsHeard) {
  ASSERT_TRUE(job_.receive(1, Suspect{kSuspected}));
  ASSERT_TRUE(job_.receive(2, Leave{1, 0, "", "", false}));
  job_.tell_departed();
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
  EXPECT_FALSE(was_told<Reachable>()) << "its server may be stopped";
  ASSERT_TRUE(job_.receive(2, Heartbeat{}));
  EXPECT_TRUE(was_told<Reachable>());
  EXPECT_FALSE(was_told<PeerLost>());
  ASSERT_TRUE(job_.receive(1, Suspect{kSuspected, true}));
  EXPECT_TRUE(was_told<PeerLost>()) << "its connection has ended";
}

TEST_F(Suspicions, AMemberThatHasLeftAndEndsIsLost) {
  ASSERT_TRUE(job_.receive(2, Leave{1, 0, "", "", false}));
  job_.tell_departed();
  ASSERT_TRUE(job_.receive(1, Suspect{kSuspected}));
  EXPECT_FALSE(was_told<PeerLost>());
  job_.closed(2, "connection closed");
  EXPECT_TRUE(was_told<PeerLost>());
}

// One that has left sums until its connection ends: up to then it has to know the group, and from then on it cannot.
TEST_F(Suspicions, AGroupDoesNotWaitForAMemberThatHasLeftAndEnds) {
  ASSERT_TRUE(job_.receive(2, Leave{1, 0, "", "", false}));
  ASSERT_TRUE(job_.receive(1, NewGroup{7, {0}, "alone"}));
  ASSERT_TRUE(job_.receive(1, GroupAck{1}));
  EXPECT_FALSE(was_told<GroupReady>());
  job_.closed(2, "connection closed");
  EXPECT_TRUE(was_told<GroupReady>());
}

TEST_F(Suspicions, AGroupThatIsBeingMadeWaitsForOneThatLeavesMeanwhile) {
  ASSERT_TRUE(job_.receive(1, NewGroup{7, {0}, "alone"}));
  ASSERT_TRUE(job_.receive(1, GroupAck{1}));
  ASSERT_TRUE(job_.receive(2, Leave{1, 0, "", "", false}));
  EXPECT_FALSE(was_told<GroupReady>()) << "it would refuse a push of a group that it does not know";
  ASSERT_TRUE(job_.receive(2, GroupAck{1}));
  EXPECT_TRUE(was_told<GroupReady>());
}

// Both members of a job that goes on without lost ones are here, and come again when a view has ended.
class BrokenConnections : public testing::Test {
 protected:
  BrokenConnections() {
    for (std::uint32_t rank = 0; rank < 2; ++rank) join(rank, 0);
  }

  void join(std::uint32_t rank, std::uint32_t renews) {
    peers_[rank] = ++last_peer_;
    Join join{.node = {}, .workers = 2, .servers = 2, .patience_ms = 1000, .renews = renews, .epoch = epoch_};
    join.node.worker_rank = join.node.server_rank = static_cast<std::int32_t>(rank);
    join.node.worker_loops = join.node.server_loops = 1;
    join.node.identity = rank + 1;
    join.node.terms.min_workers = 1;
    ASSERT_TRUE(job_.receive(peers_[rank], join));
  }
  // Rank 0 has lost its connection to rank 1, which then shows that it is alive.
  void break_connection() {
    ASSERT_TRUE(job_.receive(peers_[0], Suspect{2, true}));
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    ASSERT_TRUE(job_.receive(peers_[1], Heartbeat{}));
  }
  void renew() {
    const std::uint64_t before[] = {peers_[0], peers_[1]};
    for (std::uint32_t rank = 0; rank < 2; ++rank) join(rank, rank + 1);
    for (const Peer peer : before) job_.closed(peer, "it has come again");
  }
  template <typename Kind>
  std::vector<Peer> told() const {
    std::vector<Peer> peers;
    for (const auto& [peer, message] : sent_) {
      if (std::holds_alternative<Kind>(message)) peers.push_back(peer);
    }
    return peers;
  }
  static Job::Options options() {
    Job::Options made;
    made.registry.workers = made.registry.servers = 2;
    made.terms.min_workers = 1;
    return made;
  }

  std::uint32_t epoch_ = 1;
  Peer last_peer_ = 0;
  Peer peers_[2] = {};
  std::vector<std::pair<Peer, Message>> sent_;
  Job job_{options(),
           {.send = [this](Peer peer, const Message& message) { sent_.emplace_back(peer, message); },
            .on_lost = nullptr,
            .on_over = nullptr,
            .close = nullptr,
            .on_epoch = [this](std::uint32_t epoch) { epoch_ = epoch; }}};
};

TEST_F(BrokenConnections, EndTheViewAndNobodyIsLost) {
  break_connection();
  EXPECT_EQ(told<ViewEnded>(), (std::vector<Peer>{peers_[0], peers_[1]}));
  EXPECT_TRUE(told<Departed>().empty());
  EXPECT_TRUE(told<Reachable>().empty());
  EXPECT_EQ(job_.counts().lost, 0U);
}

TEST_F(BrokenConnections, OverAndOverAreTheLossOfOne) {
  for (int i = 0; i < 2; ++i) {
    break_connection();
    renew();
  }
  sent_.clear();
  break_connection();
  EXPECT_EQ(job_.counts().lost, 1U);
  EXPECT_EQ(told<Refused>(), std::vector<Peer>{peers_[1]}) << "it is told that the job goes on without it";
  EXPECT_EQ(told<ViewEnded>(), std::vector<Peer>{peers_[0]});
}

TEST_F(BrokenConnections, CountAnewAfterACommittedStep) {
  for (int i = 0; i < 2; ++i) {
    break_connection();
    renew();
  }
  for (const Peer peer : peers_) {
    ASSERT_TRUE(job_.receive(peer, Barrier{.call = 7, .group = 0, .partition_bytes = 0, .ends_step = true}));
  }
  break_connection();
  EXPECT_EQ(job_.counts().lost, 0U);
}

}  // namespace
}  // namespace bps::van
