// SPDX-License-Identifier: Apache-2.0
// Members and schedulers that vanish, fall silent, or are stopped for a moment.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <future>

#include "child_process.h"
#include "concatenate.h"
#include "reserved_port.h"
#include "van/messages.h"
#include "van/van_fixture.h"

namespace bps::van {
namespace {

using namespace test;

TEST(Lost, WhoWaitedLongForTheOthersIsNotSilent) {
  const auto scheduler = make_scheduler(1, 1, [](SchedulerOptions& options) { options.heartbeat_timeout_s = 4; });
  TestNode server({scheduler->port()});
  TestNode worker({scheduler->port()});
  together({[&] { server.join(kNoRank, kAnyRank, 1, 1); },
            [&] {
              std::this_thread::sleep_for(std::chrono::milliseconds(4500));
              worker.join(0, kNoRank, 1, 1);
            }});
  // The scheduler looks twice a second; it answers the signs of life, which are due four times in its time-out.
  for (int signs = 0; signs < 2; ++signs) {
    const auto before = server->heard();
    EXPECT_TRUE(eventually([&] { return server->heard() > before; }));
  }
  EXPECT_TRUE(worker.lost().empty()) << worker.lost().begin()->second;
  EXPECT_TRUE(worker->leave(10));
}

TEST(Lost, ACrashIsToldToEverybodyAtOnce) {
  JointJob job(3);
  together({[&] {
              const Thrown thrown = thrown_by([&] { job[0]->barrier(job[0].all(), 20); });
              EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
              EXPECT_EQ(thrown.what,
                        "barrier of group 0: worker 1 and server 1 (a, pid 42) was lost: connection closed");
            },
            [&] {
              const Thrown thrown = thrown_by([&] { job[2]->new_group({1, 2}, "g", 20); });
              EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
              EXPECT_EQ(thrown.what, "group 'g': worker 1 and server 1 (a, pid 42) was lost: connection closed");
            },
            [&] {
              ASSERT_TRUE(eventually([&] { return job.scheduler->counters().messages >= 5; }));
              job[1].destroy();
            }});
  for (const std::size_t i : {0, 2}) {
    EXPECT_EQ(job[i].lost().at(2), "worker 1 and server 1 (a, pid 42) was lost: connection closed");
  }
  EXPECT_EQ(thrown_by([&] { job[0]->barrier(job[0].all(), 20); }).code, ErrorCode::kPeerLost) << "and ever after";
  const std::vector<TensorSpec> specs{{0, "w", 0, 12, "(3, 4)"}};
  EXPECT_EQ(job[0]->declare(specs).size(), 1U) << "the scheduler still serves the others";
  together({[&] { job[0]->barrier(job[0]->new_group({0, 2}, "rest", 10), 10); },
            [&] { job[2]->barrier(job[2]->new_group({0, 2}, "rest", 10), 10); }});
  EXPECT_EQ(job.scheduler->counters().lost, 1U);
}

// Or what is under way would end for no reason that anybody has told, when its caller goes into the next view.
TEST(Lost, TheEndOfTheViewIsToldBeforeACallRaisesIt) {
  const auto scheduler = make_scheduler(2, 2, [](SchedulerOptions& options) { options.terms.min_workers = 1; });
  TestNode lost({scheduler->port()});
  lost.terms.min_workers = 1;
  std::atomic<bool> is_told{false};
  VanEvents events;
  events.on_view_ended = [&](const std::string&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for a call that does not wait for this
    is_told = true;
  };
  Van van({.scheduler_ports = {scheduler->port()}}, kJob, std::move(events));
  Node self;
  self.worker_rank = 0;
  self.server_rank = kAnyRank;
  self.host = "a";
  self.identity = 1;
  self.worker_loops = self.server_loops = 1;
  self.terms = lost.terms;
  together({[&] { van.join(self, 2, 2); }, [&] { lost.join(1, kAnyRank, 2, 2); }});
  together({[&] {
              EXPECT_EQ(thrown_by([&] { van.barrier({0, {0, 1}}, 20); }).code, ErrorCode::kRoundAborted);
              EXPECT_TRUE(is_told);
            },
            [&] { lost.destroy(); }});
}

// ---- Causes: who is to blame for a connection that broke

constexpr const char* kWorker2Lost = "worker 2 and server 2 (a, pid 42) was lost: connection closed";

TEST(Causes, AMemberThatLeftBecauseOfALossIsNotTheCause) {
  JointJob job(3);
  job[2].destroy();
  for (const std::size_t i : {0, 1}) ASSERT_TRUE(eventually([&] { return job[i].lost().contains(3); }));
  EXPECT_FALSE(job[0]->leave(0.05)) << "the other one has not left";
  ASSERT_TRUE(eventually([&] { return job[1].lost().contains(1); })) << "the scheduler tells without being asked";
  EXPECT_EQ(job[1].lost().at(1), kWorker2Lost);
  job[1]->suspect(1, "closed");  // is known already
  const Thrown thrown = thrown_by([&] { job[1]->barrier(job[1].all(), 20); });
  EXPECT_NE(thrown.what.find(kWorker2Lost), std::string::npos) << thrown.what;
  EXPECT_TRUE(job[1]->leave(10));
  EXPECT_FALSE(job[1]->wait_for_end());
}

TEST(Causes, ASuspectThatIsHeardOfMeansABrokenConnection) {
  JointJob job(3);
  job[0]->suspect(2, "reset by peer");
  ASSERT_TRUE(eventually([&] { return job[0].lost().contains(2); }));
  const std::string text = "the connection to worker 1 and server 1 (a, pid 42) was lost: reset by peer";
  EXPECT_EQ(job[0].lost().at(2), text);
  EXPECT_TRUE(job[2].lost().empty()) << "the others can still use it";
  EXPECT_FALSE(job[0]->leave(0.05));
  for (const std::size_t i : {1, 2}) {
    ASSERT_TRUE(eventually([&] { return job[i].lost().contains(1); }));
    EXPECT_EQ(job[i].lost().at(1), "rank 0 says: " + text) << "either end of that connection may be the cause";
  }
}

TEST(Causes, ASuspectThatDiesIsTheCause) {
  JointJob job(3);
  job[0]->suspect(3, "reset by peer");
  job[2].destroy();
  ASSERT_TRUE(eventually([&] { return job[0].lost().contains(3); }));
  const std::string text = job[0].lost().at(3);
  // A heartbeat may have been on its way when the suspicion came.
  EXPECT_TRUE(text == kWorker2Lost || text.find("reset by peer") != std::string::npos) << text;
  ASSERT_TRUE(eventually([&] { return job[1].lost().contains(3); }));
  EXPECT_EQ(job[1].lost().at(3), kWorker2Lost);
}

TEST(Causes, ASuspectThatHasLeftIsSaidToHaveLeft) {
  JointJob job(2);
  EXPECT_FALSE(job[1]->leave(0.05));
  job[0]->suspect(2, "closed");
  ASSERT_TRUE(eventually([&] { return job[0].lost().contains(2); }));
  EXPECT_EQ(job[0].lost().at(2), "worker 1 and server 1 (a, pid 42) has left the job");
}

TEST(Causes, WithoutASchedulerItsLossIsTheCause) {
  JointJob job(2);
  job.scheduler.reset();
  ASSERT_TRUE(eventually([&] { return job[0].lost().contains(0); }));
  job[0]->suspect(2, "closed");
  ASSERT_TRUE(eventually([&] { return job[0].lost().contains(2); }));
  EXPECT_EQ(job[0].lost().at(2), job[0].lost().at(0));
  EXPECT_NE(job[0].lost().at(2).find("the scheduler at "), std::string::npos) << job[0].lost().at(2);
}

TEST(Lost, LeavingWithoutTheLost) {
  JointJob job(3);
  job[1].destroy();
  together({[&] { EXPECT_TRUE(job[0]->leave(10)); }, [&] { EXPECT_TRUE(job[2]->leave(10)); }});
  EXPECT_FALSE(job[0]->wait_for_end()) << "it did not end well";
  job[0].destroy();
  job[2].destroy();
  EXPECT_FALSE(job.scheduler->wait());
}

TEST(Lost, WhenAllWorkersAreLostServersEnd) {
  const auto scheduler = make_scheduler(2, 1);
  TestNode zero({scheduler->port()}), one({scheduler->port()}), server({scheduler->port()});
  together({[&] { zero.join(0, kNoRank, 2, 1); }, [&] { one.join(1, kNoRank, 2, 1); },
            [&] { server.join(kNoRank, 0, 2, 1); }});
  together({[&] { EXPECT_FALSE(server->wait_for_end()); }, [&] { zero.destroy(); }, [&] { one.destroy(); }});
  EXPECT_EQ(server.lost().size(), 2U);
}

TEST(Lost, WhoHasLeftIsNotWaitedFor) {
  JointJob job(2);
  EXPECT_FALSE(job[1]->leave(0.05)) << "the other one has not left";
  const Thrown thrown = thrown_by([&] { job[0]->barrier(job[0].all(), 20); });
  EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
  EXPECT_EQ(thrown.what, "barrier of group 0: worker 1 and server 1 (a, pid 42) has left the job");
  EXPECT_EQ(thrown_by([&] { job[1]->barrier(job[1].all(), 1); }).code, ErrorCode::kNotInitialized);
  job[1].destroy();
  EXPECT_TRUE(job[0]->leave(10));
  EXPECT_TRUE(job[0]->wait_for_end()) << "leaving is no loss, even if the process ends early";
  EXPECT_TRUE(job[0].lost().empty());
  EXPECT_EQ(job[0].left(),
            (std::map<std::uint32_t, std::string>{{1, "worker 0 and server 0 (a, pid 42) has left the job"},
                                                  {2, "worker 1 and server 1 (a, pid 42) has left the job"}}));
}

// The others may have left because of it.
TEST(Lost, TheFirstThatHasLeftIsNamed) {
  JointJob job(3);
  std::thread first([&] { (void)job[1]->leave(10); });
  ASSERT_TRUE(eventually([&] { return !job[0].left().empty() && !job[2].left().empty(); }));
  std::thread second([&] { (void)job[0]->leave(10); });
  ASSERT_TRUE(eventually([&] { return job[2].left().size() == 2; }));
  EXPECT_EQ(thrown_by([&] { (void)job[2]->new_group({0, 1, 2}, "all", 10); }).what,
            "group 'all': worker 1 and server 1 (a, pid 42) has left the job");
  EXPECT_EQ(thrown_by([&] { job[2]->barrier(job[2].all(), 10); }).what,
            "barrier of group 0: worker 1 and server 1 (a, pid 42) has left the job");
  (void)job[2]->leave(10);
  first.join();
  second.join();
}

// What they sum for others must not wait for what a member that has left will not push.
TEST(Lost, LeavingIsToldToThoseThatHaveLeftToo) {
  JointJob job(3);
  EXPECT_FALSE(job[1]->leave(0.05));
  ASSERT_TRUE(eventually([&] { return job[1].left().contains(2); })) << "it sums for others";
  EXPECT_FALSE(job[2]->leave(0.05));
  for (const std::size_t i : {0, 1, 2}) {
    ASSERT_TRUE(eventually([&] { return job[i].left().contains(3); })) << i;
    EXPECT_EQ(job[i].left().at(3), "worker 2 and server 2 (a, pid 42) has left the job");
  }
}

TEST(Lost, AnExceptionIsToldToEverybodyAtOnce) {
  JointJob job(3);
  together({[&] {
              const Thrown thrown = thrown_by([&] { job[0]->barrier(job[0].all(), 20); });
              EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
              EXPECT_EQ(thrown.what, "barrier of group 0: rank 1 ended: ValueError: no such file");
            },
            [&] {
              ASSERT_TRUE(eventually([&] { return job.scheduler->counters().messages >= 4; }));
              job[1]->abort("ValueError: no such file");
              EXPECT_EQ(thrown_by([&] { job[1]->barrier(job[1].all(), 20); }).code, ErrorCode::kNotInitialized);
              EXPECT_FALSE(job[1]->leave(0.05)) << "the others have not left";
            }});
  for (const std::size_t i : {0, 2}) {
    ASSERT_TRUE(eventually([&] { return job[i].lost().contains(2); }));
    EXPECT_EQ(job[i].lost().at(2), "rank 1 ended: ValueError: no such file");
    EXPECT_TRUE(job[i].left().empty());
  }
  job[2]->abort("PeerLostError: rank 1 ended: ValueError: no such file");
  ASSERT_TRUE(eventually([&] { return job[0].lost().contains(3); }));
  EXPECT_EQ(job[0].lost().at(3), "rank 1 ended: ValueError: no such file") << "the first cause";
  EXPECT_TRUE(job[0]->leave(10));
  EXPECT_FALSE(job[0]->wait_for_end()) << "it did not end well";
}

TEST(Lost, LeavingEndsTheCallsOfOtherThreads) {
  JointJob job(2);
  together({[&] { EXPECT_EQ(thrown_by([&] { job[0]->barrier(job[0].all(), 20); }).code, ErrorCode::kNotInitialized); },
            [&] { EXPECT_EQ(thrown_by([&] { job[0]->new_group({0, 1}, "g", 20); }).code, ErrorCode::kNotInitialized); },
            [&] {
              ASSERT_TRUE(eventually([&] { return job.scheduler->counters().messages >= 4; }));
              EXPECT_FALSE(job[0]->leave(0.05));
            }});
}

TEST(Lost, GivingUpEndsTheWaitForTheEnd) {
  JointJob job(1);
  together({[&] { EXPECT_FALSE(job[0]->wait_for_end()); }, [&] { job[0]->give_up(); }});
}

TEST(Lost, AShortStopIsForgiven) {
  const ReservedPort reserved;  // for a scheduler that starts after its child processes
  const std::uint16_t port = reserved.number();
  const ChildProcess child([port] {
    TestNode node({port});
    node.join(1, kNoRank, 2, 0);
    node->barrier(node.all(), 20);
    stay();
  });
  const auto scheduler = make_scheduler(2, 0, [port](auto& options) { options.ports = {port}; });
  TestNode node({port});
  node.join(0, kNoRank, 2, 0);
  child.stop();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  child.signal(SIGCONT);
  node->barrier(node.all(), 20);
  EXPECT_EQ(scheduler->counters().lost, 0U);
}

// A server that has asked to join the next view is stopped before the others come. When it goes on, the connection of
// the view before may be what it reads first.
TEST(Lost, AStopWhileTheNextViewBeginsIsForgiven) {
  const ReservedPort reserved;  // for a scheduler that starts after its child processes
  const std::uint16_t port = reserved.number();
  // A pipe: the server has looked whether what it was told is still so. (What is an Fd would be closed in a child.)
  std::array<int, 2> looked{};
  ASSERT_EQ(::pipe2(looked.data(), O_CLOEXEC), 0);
  ChildProcess child([port, &looked] {
    TestNode before({port});
    before.join(kNoRank, 0, 1, 1);
    if (!eventually([&] { return before->end().view_ended(); })) throw std::runtime_error("the job was not suspended");
    TestNode next({port}, kJob, 20, before->self().id);
    std::thread joining([&] { next.join(kNoRank, 0, 1, 1); });
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    ::raise(SIGSTOP);
    joining.join();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    before->end().require_next_view();
    before->inquire(1);  // too late, and no harm
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    before->end().require_next_view();
    if (::write(looked[1], "", 1) != 1) throw std::runtime_error("nobody listens");
    before.destroy();
    if (!next->wait_for_end()) throw std::runtime_error(next->end().why());
  });
  const auto scheduler = make_scheduler(1, 1, [port](auto& options) {
    options.ports = {port};
    options.resume_timeout_s = 20;
    options.heartbeat_timeout_s = 8;
  });
  TestNode worker({port}), resumed({port});
  worker.join(0, kNoRank, 1, 1);
  EXPECT_TRUE(worker->leave(10, "", true));
  child.wait_until_stopped();
  resumed.join(0, kNoRank, 1, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(4200));
  child.signal(SIGCONT);
  pollfd there{looked[0], POLLIN, 0};
  EXPECT_EQ(::poll(&there, 1, 30'000), 1);
  for (const int end : looked) ::close(end);
  EXPECT_TRUE(resumed->leave(10));
  EXPECT_TRUE(child.ends_well());
  EXPECT_EQ(scheduler->counters().lost, 0U);
}

// A scheduler that is stopped has been silent since its last heartbeat, and not since the stop.
TEST(Lost, TheSchedulerSaysOftenThatItLives) {
  const auto scheduler = make_scheduler(1, 1, [](auto& options) { options.heartbeat_timeout_s = 100; });
  TestNode node({scheduler->port()});
  node.join(0, 0, 1, 1);
  for (int signs = 0; signs < 3; ++signs) {
    const auto before = node->heard();
    EXPECT_TRUE(eventually([&] { return node->heard() > before; }))
        << "it answers heartbeats, which are due every 25 seconds";
  }
}

TEST(Lost, ASchedulerThatHearsNobodySaysSo) {
  const ReservedPort reserved;  // for a scheduler that starts after its child processes
  const std::uint16_t port = reserved.number();
  const auto member = [port](std::int32_t rank) {
    TestNode node({port});
    node.join(rank, kNoRank, 2, 0);
    node->barrier(node.all(), 20);
    stay();
  };
  const ChildProcess zero([&] { member(0); });
  const ChildProcess one([&] { member(1); });
  std::promise<std::string> first;
  const auto scheduler = make_scheduler(2, 0, [&](auto& options) {
    options.ports = {port};
    options.heartbeat_timeout_s = 1;
    options.on_lost = [&, told = false](const std::string& text) mutable {
      if (!std::exchange(told, true)) first.set_value(text);
    };
  });
  ASSERT_TRUE(eventually([&] { return scheduler->counters().barriers > 0; }));
  zero.stop();
  one.stop();
  const std::string text = first.get_future().get();
  EXPECT_NE(text.find(", and so are all others: the scheduler's own network may be cut"), std::string::npos) << text;
}

TEST(Lost, ASchedulerThatGoesAwayIsReported) {
  JointJob job(2);
  const std::string text =
      "the scheduler at 127.0.0.1:" + std::to_string(job.scheduler->port()) + " was lost: connection closed";
  const auto messages = job.scheduler->counters().messages;
  together({[&] {
              const Thrown thrown = thrown_by([&] { job[0]->barrier(job[0].all(), 20); });
              EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
              EXPECT_EQ(thrown.what, text);
            },
            [&] {
              ASSERT_TRUE(eventually([&] { return job.scheduler->counters().messages > messages; }));
              job.scheduler.reset();
            }});
  for (const std::size_t i : {0, 1}) {
    EXPECT_FALSE(job[i]->wait_for_end());
    EXPECT_EQ(job[i].lost().at(0), text);
    EXPECT_EQ(thrown_by([&] { job[i]->barrier(job[i].all(), 20); }).what, text) << "and ever after";
    EXPECT_EQ(thrown_by([&] { job[i]->leave(20); }).what, text);
  }
}

TEST(Lost, ASchedulerThatGoesAwayEndsLeaving) {
  JointJob job(2);
  const auto messages = job.scheduler->counters().messages;
  together({[&] { EXPECT_EQ(thrown_by([&] { job[1]->leave(20); }).code, ErrorCode::kPeerLost); },
            [&] {
              ASSERT_TRUE(eventually([&] { return job.scheduler->counters().messages > messages; }));
              job.scheduler.reset();
            }});
}

TEST(Lost, ASilentSchedulerIsReported) {
  const ReservedPort reserved;  // for a scheduler that starts after its child processes
  const std::uint16_t port = reserved.number();
  const ChildProcess child([port] {
    const auto scheduler = make_scheduler(1, 1, [port](auto& options) {
      options.ports = {port};
      options.heartbeat_timeout_s = 1;
    });
    stay();
  });
  TestNode node({port});
  node.join(0, 0, 1, 1);
  child.stop();
  EXPECT_FALSE(node->wait_for_end());
  EXPECT_NE(node.lost().at(0).find("was lost: silent for "), std::string::npos) << node.lost().at(0);
}

// A member that authenticates, joins, and then does what `behave` says with its socket.
using Behaviour = std::function<void(int socket, transport::MessageSigner& signer)>;
void raw_member(std::uint16_t port, const Behaviour& behave) {
  const Fd socket = transport::connect_tcp("127.0.0.1", port, Deadline::after(5));
  const auto session = transport::client_handshake(socket.get(), {}, kJob, Deadline::after(5), "the scheduler");
  auto keys = transport::MessageKeys::of_client(session.key);
  Node self;
  self.worker_loops = 1;
  self.worker_rank = 1;
  const Bytes bytes = test::framed(encode(Join{self, 2, 0, 20000}), keys.sent);
  ASSERT_EQ(::send(socket.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  for (std::optional<Message> heard; !heard || !std::holds_alternative<Welcome>(*heard);) {
    std::uint32_t length = 0;
    ASSERT_EQ(::recv(socket.get(), &length, sizeof length, MSG_WAITALL), 4);
    Bytes message(length + sizeof(transport::MessageMac));
    ASSERT_EQ(::recv(socket.get(), message.data(), message.size(), MSG_WAITALL), static_cast<ssize_t>(message.size()));
    heard = decode(std::span(message).first(length));
    ASSERT_TRUE(heard);
  }
  behave(socket.get(), keys.sent);
  std::array<char, 4096> rest;
  while (::recv(socket.get(), rest.data(), rest.size(), 0) > 0) continue;  // until the scheduler hangs up
}

Thrown partner_of(const Behaviour& behave) {
  const auto scheduler = make_scheduler(2, 0, [](auto& options) { options.heartbeat_timeout_s = 1; });
  TestNode node({scheduler->port()});
  Thrown thrown;
  together({[&] { raw_member(scheduler->port(), behave); },
            [&] {
              node.join(0, kNoRank, 2, 0);
              thrown = thrown_by([&] { node->barrier(node.all(), 20); });
            }});
  EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
  return thrown;
}

TEST(Lost, SilenceOnAnOpenConnectionIsNoticed) {
  EXPECT_NE(partner_of([](int, transport::MessageSigner&) {}).what.find("silent for "), std::string::npos);
}

TEST(Lost, GarbageEndsAMembership) {
  const auto say = [](const Bytes& message) {
    return [message](int fd, transport::MessageSigner& signer) {
      const Bytes bytes = test::framed(message, signer);
      EXPECT_GT(::send(fd, bytes.data(), bytes.size(), 0), 0);
    };
  };
  EXPECT_NE(partner_of(say(Bytes(7, std::byte{0xee}))).what.find("malformed message"), std::string::npos);
  EXPECT_NE(partner_of(say(encode(AllLeft{}))).what.find("unexpected message"), std::string::npos);
  const Thrown too_long =
      partner_of([](int fd, transport::MessageSigner&) { EXPECT_GT(::send(fd, "\xff\xff\xff\xff", 4, 0), 0); });
  EXPECT_NE(too_long.what.find("beyond the limit"), std::string::npos);
}

// Whoever can change packets on the way can end a connection, and nothing else.
TEST(Lost, AMessageThatWasChangedOrRepeatedEndsAMembership) {
  const Bytes beat = encode(Heartbeat{});
  const auto forge = [&](const std::function<Bytes(transport::MessageSigner&)>& bytes_of) {
    const Thrown thrown = partner_of([&](int fd, transport::MessageSigner& signer) {
      const Bytes bytes = bytes_of(signer);
      EXPECT_EQ(::send(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    });
    EXPECT_NE(thrown.what.find("failed its authentication"), std::string::npos) << thrown.what;
  };
  forge([&](auto& signer) {
    Bytes changed = test::framed(beat, signer);
    changed.back() ^= std::byte{1};
    return changed;
  });
  forge([&](auto& signer) {
    const Bytes once = test::framed(beat, signer);
    return concatenate({once, once});
  });
  forge([&](auto& signer) {
    (void)test::framed(beat, signer);  // left out
    return test::framed(beat, signer);
  });
}

}  // namespace
}  // namespace bps::van
