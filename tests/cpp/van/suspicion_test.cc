// SPDX-License-Identifier: Apache-2.0
// A member says that its connection to another one broke: what the scheduler tells it of that one, and when.
#include <gtest/gtest.h>

#include <string>
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
  ASSERT_TRUE(job_.receive(2, Heartbeat{}));
  EXPECT_TRUE(was_told<Reachable>());
}

// The scheduler was busy, and reads the heartbeat and the end of the connection after the suspicion.
TEST_F(Suspicions, AHeartbeatFromBeforeItsDeathProvesNothing) {
  ASSERT_TRUE(job_.receive(1, Suspect{kSuspected}));
  ASSERT_TRUE(job_.receive(2, Heartbeat{}));
  EXPECT_FALSE(was_told<Reachable>());
  job_.closed(2, "connection closed");
  EXPECT_FALSE(was_told<Reachable>());
  EXPECT_TRUE(was_told<PeerLost>());
}

}  // namespace
}  // namespace bps::van
