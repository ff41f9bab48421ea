// SPDX-License-Identifier: Apache-2.0
#include <sys/socket.h>

#include "core/clock.h"
#include "reserved_port.h"
#include "transport/listener.h"
#include "van/messages.h"
#include "van/van_fixture.h"

namespace bps::van {
namespace {

using namespace test;

TEST(Join, WorkersAndServersInAnyOrder) {
  const auto scheduler = make_scheduler(2, 2);
  std::vector<std::unique_ptr<TestNode>> nodes;
  for (int i = 0; i < 3; ++i) nodes.push_back(std::make_unique<TestNode>(std::vector{scheduler->port()}));
  together({[&] { nodes[0]->join(1, kNoRank, 2, 2); }, [&] { nodes[1]->join(kNoRank, 0, 2, 2); },
            [&] { nodes[2]->join(0, 1, 2, 2); }});
  for (auto& node : nodes) {
    const Membership& members = (*node)->membership();
    EXPECT_TRUE(members.is_consistent());
    EXPECT_EQ(members.nodes.size(), 3U);
    EXPECT_EQ(&(*node)->self(), members.by_id((*node)->self().id));
  }
  EXPECT_EQ((*nodes[0])->self().worker_rank, 1);
  EXPECT_EQ((*nodes[1])->self().server_rank, 0);
  EXPECT_EQ((*nodes[2])->self().id, 1U);
  EXPECT_TRUE(nodes[0]->groups().empty());
  EXPECT_EQ(nodes[1]->groups().at(0), (Group{0, {0, 1}})) << "servers know group 0 when join returns";
  EXPECT_EQ(nodes[2]->groups().size(), 1U);
}

TEST(Join, AddressesArriveUnchanged) {
  const auto scheduler = make_scheduler(1, 1);
  TestNode node({scheduler->port()});
  Node self{.worker_rank = kAnyRank,
            .server_rank = kAnyRank,
            .worker_loops = 3,
            .server_loops = 5,
            .pid = 77,
            .host = "here",
            .host_key = "key",
            .addresses = {{"tcp", Bytes(9, std::byte{3})}}};
  node->join(self, 1, 1);
  self.id = 1;
  self.worker_rank = self.server_rank = 0;
  EXPECT_EQ(node->self(), self);
}

TEST(Join, ConflictsAreRefusedAndTheOthersGoOn) {
  const auto scheduler = make_scheduler(2, 0);
  const std::vector ports{scheduler->port()};
  TestNode first(ports), second(ports), same_rank(ports), high_rank(ports), other_counts(ports), late(ports);
  together({[&] { first.join(0, kNoRank, 2, 0); },
            [&] {
              EXPECT_TRUE(eventually([&] { return scheduler->counters().messages == 1; }));
              const Thrown taken = thrown_by([&] { same_rank.join(0, kNoRank, 2, 0); });
              EXPECT_EQ(taken.code, ErrorCode::kMismatch);
              EXPECT_EQ(taken.what, "worker rank 0 is taken by the process with pid 42 on a");
              EXPECT_EQ(thrown_by([&] { high_rank.join(2, kNoRank, 2, 0); }).code, ErrorCode::kMismatch);
              EXPECT_EQ(thrown_by([&] { other_counts.join(1, kNoRank, 3, 0); }).code, ErrorCode::kMismatch);
              second.join(1, kNoRank, 2, 0);
            }});
  EXPECT_EQ(thrown_by([&] { late.join(1, kNoRank, 2, 0); }).what,
            "the job is running already: all its members have joined");
  EXPECT_EQ(scheduler->counters().refused, 4U);
  EXPECT_EQ(scheduler->counters().lost, 0U);
}

TEST(Join, TimeOutTellsEverybodyWhoIsMissing) {
  const auto scheduler = make_scheduler(4, 0, [](auto& options) { options.join_timeout_s = 0.3; });
  TestNode zero({scheduler->port()}), two({scheduler->port()});
  const auto expect_timeout = [](TestNode& node, std::int32_t rank) {
    const Thrown thrown = thrown_by([&] { node.join(rank, kNoRank, 4, 0); });
    EXPECT_EQ(thrown.code, ErrorCode::kTimeout);
    EXPECT_EQ(thrown.what, "not all members came in time: 2 of 4 workers joined; missing ranks 1, 3");
  };
  together({[&] { expect_timeout(zero, 0); }, [&] { expect_timeout(two, 2); }});
  EXPECT_FALSE(scheduler->wait());
}

TEST(Join, TheMostImpatientMemberDecides) {
  const auto scheduler = make_scheduler(2, 0);
  TestNode impatient({scheduler->port()}, kJob, 0.2);
  EXPECT_EQ(thrown_by([&] { impatient.join(kAnyRank, kNoRank, 2, 0); }).what,
            "not all members came in time: 1 of 2 workers joined");
}

TEST(Join, WhoDiesWhileWaitingCanBeReplaced) {
  const auto scheduler = make_scheduler(2, 0);
  {
    const Fd socket = transport::connect_tcp("127.0.0.1", scheduler->port(), Deadline::after(5));
    const auto session = transport::client_handshake(socket.get(), {}, kJob, Deadline::after(5), "the scheduler");
    auto keys = transport::MessageKeys::of_client(session.key);
    Join join{{.worker_rank = 0, .host = "", .host_key = "", .addresses = {}}, 2, 0, 5000};
    const Bytes bytes = test::framed(encode(join), keys.sent);
    ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    ASSERT_TRUE(eventually([&] { return scheduler->counters().messages == 1; }));
  }
  TestNode zero({scheduler->port()}), one({scheduler->port()});
  together({[&] { zero.join(0, kNoRank, 2, 0); }, [&] { one.join(1, kNoRank, 2, 0); }});
}

TEST(Join, TwoJobsShareTheirPorts) {
  const auto job_b = transport::Credentials::from("job b", "secret");
  const auto first = make_scheduler(2, 0);
  const auto second = make_scheduler(2, 0, {}, job_b);
  const std::vector ports{first->port(), second->port()};
  TestNode a0(ports), a1(ports), b0(ports, job_b), b1(ports, job_b);
  together({[&] { a0.join(0, kNoRank, 2, 0); }, [&] { b0.join(0, kNoRank, 2, 0); }, [&] { a1.join(1, kNoRank, 2, 0); },
            [&] { b1.join(1, kNoRank, 2, 0); }});
  together({[&] { a0->barrier(a0.all(), 10); }, [&] { a1->barrier(a1.all(), 10); }});
  EXPECT_EQ(first->counters().barriers, 1U);
  EXPECT_EQ(second->counters().barriers, 0U);
}

TEST(Join, TheNextJobMayHaveThePortAtOnce) {
  std::uint16_t port = 0;
  for (int round = 0; round < 5; ++round) {
    const auto scheduler = make_scheduler(1, 1, [port](auto& options) { options.ports = {port}; });
    port = scheduler->port();
    TestNode node({port});
    node.join(0, 0, 1, 1);
    EXPECT_TRUE(node->leave(10));
    // The old members' connections still exist: that must not keep the next job from the port.
    const auto next = make_scheduler(1, 1, [port](auto& options) { options.ports = {port}; });
    TestNode successor({port});
    successor.join(0, 0, 1, 1);
    EXPECT_TRUE(successor->leave(10));
  }
}

TEST(Join, TheSchedulerMayComeLater) {
  const ReservedPort reserved;
  const std::uint16_t port = reserved.number();
  TestNode node({port});
  std::unique_ptr<Scheduler> scheduler;
  together({[&] { node.join(0, 0, 1, 1); },
            [&] {
              std::this_thread::sleep_for(std::chrono::milliseconds(100));
              scheduler = make_scheduler(1, 1, [port](auto& options) { options.ports = {port}; });
            }});
  EXPECT_TRUE(node->leave(10));
}

TEST(Join, TheFirstFreePortIsTaken) {
  const Fd taken = transport::Listener::listen_tcp("127.0.0.1", 0);
  const std::uint16_t port = transport::Listener::port_of(taken.get());
  const auto scheduler = make_scheduler(1, 0, [port](auto& options) { options.ports = {port, 0}; });
  EXPECT_NE(scheduler->port(), port);
  EXPECT_EQ(thrown_by([&] { make_scheduler(1, 0, [port](auto& options) { options.ports = {port}; }); }).code,
            ErrorCode::kPortTaken);
}

TEST(Join, CallsNeedAJoinedVan) {
  TestNode node({1});
  EXPECT_EQ(thrown_by([&] { node->barrier({}, 1); }).code, ErrorCode::kNotInitialized);
  EXPECT_EQ(thrown_by([&] { node->membership(); }).code, ErrorCode::kNotInitialized);
  EXPECT_EQ(thrown_by([&] { node->leave(1); }).code, ErrorCode::kNotInitialized);
}

}  // namespace
}  // namespace bps::van
