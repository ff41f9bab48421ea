// SPDX-License-Identifier: Apache-2.0
#include "core/event_loop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>

#include <array>
#include <thread>

#include "core/error.h"

namespace bps {
namespace {

using std::chrono::milliseconds;

constexpr Duration kLong = std::chrono::seconds(20);  // nobody waits so long: a test that does has failed

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) throw_errno("pipe");
    read = Fd(ends[0]);
    write = Fd(ends[1]);
  }
  void fill() { ASSERT_EQ(::write(write.get(), "x", 1), 1); }
  void drain() {
    char byte = 0;
    ASSERT_EQ(::read(read.get(), &byte, 1), 1);
  }
  Fd read;
  Fd write;
};

TEST(EventLoop, CallsWhatIsReadyUntilItIsRead) {
  EventLoop loop;
  Pipe pipe;
  int calls = 0;
  loop.watch(pipe.read.get(), EPOLLIN, [&](std::uint32_t events) {
    EXPECT_NE(events & EPOLLIN, 0U);
    if (++calls == 2) pipe.drain();
  });
  EXPECT_EQ(loop.turn(Duration::zero()), 0);
  pipe.fill();
  EXPECT_EQ(loop.turn(kLong), 1);  // level-triggered: again and again
  EXPECT_EQ(loop.turn(kLong), 1);
  EXPECT_EQ(loop.turn(Duration::zero()), 0);
  EXPECT_EQ(calls, 2);
}

TEST(EventLoop, ChangesWhatItWaitsFor) {
  EventLoop loop;
  Pipe pipe;
  int calls = 0;
  loop.watch(pipe.write.get(), 0, [&](std::uint32_t) { ++calls; });
  EXPECT_EQ(loop.turn(Duration::zero()), 0);
  loop.change(pipe.write.get(), EPOLLOUT);
  EXPECT_EQ(loop.turn(kLong), 1);
  loop.change(pipe.write.get(), 0);
  EXPECT_EQ(loop.turn(Duration::zero()), 0);
  EXPECT_EQ(calls, 1);
}

// Ready all the time, as a socket is to which nothing can be sent because the system is short of memory.
TEST(EventLoop, TellsNothingOfWhatRests) {
  EventLoop loop;
  Pipe pipe;
  int calls = 0;
  double rest = 1e6;
  loop.watch(pipe.write.get(), EPOLLOUT, [&](std::uint32_t) {
    ++calls;
    loop.rest(pipe.write.get(), rest);
  });
  EXPECT_EQ(loop.turn(kLong), 1);
  loop.change(pipe.write.get(), EPOLLOUT | EPOLLIN);
  EXPECT_EQ(loop.turn(milliseconds(1)), 0);
  EXPECT_EQ(calls, 1);
  loop.forget(pipe.write.get());
  rest = EventLoop::kRest_s;
  loop.watch(pipe.write.get(), EPOLLOUT, [&](std::uint32_t) {
    ++calls;
    loop.rest(pipe.write.get(), rest);
  });
  while (calls < 4) loop.turn(kLong);  // after each rest
  loop.forget(pipe.write.get());
  EXPECT_EQ(loop.turn(milliseconds(3)), 0) << "in its rest";
  EXPECT_EQ(calls, 4);
}

// Whichever of two is called first forgets both: the other may not be called any more, though it is ready.
TEST(EventLoop, ForgetsInTheMiddleOfATurn) {
  EventLoop loop;
  Pipe first;
  Pipe second;
  int calls = 0;
  const auto forget_both = [&](std::uint32_t) {
    ++calls;
    loop.forget(first.read.get());
    loop.forget(second.read.get());
  };
  loop.watch(first.read.get(), EPOLLIN, forget_both);
  loop.watch(second.read.get(), EPOLLIN, forget_both);
  first.fill();
  second.fill();
  EXPECT_EQ(loop.turn(kLong), 1);
  EXPECT_EQ(loop.turn(Duration::zero()), 0);
  EXPECT_EQ(calls, 1);
  loop.forget(first.read.get());  // twice does no harm
}

TEST(EventLoop, RefusesToWatchWhatIsNoDescriptor) {
  EventLoop loop;
  EXPECT_THROW(loop.watch(-1, EPOLLIN, [](std::uint32_t) {}), Error);
}

TEST(EventLoop, RunsPostedFunctionsInOrder) {
  EventLoop loop;
  std::vector<int> ran;
  loop.post([&] {
    ran.push_back(1);
    loop.post([&] { ran.push_back(3); });
  });
  loop.post([&] { ran.push_back(2); });
  while (ran.size() < 3) loop.turn(kLong);
  EXPECT_EQ(ran, (std::vector{1, 2, 3}));
}

TEST(EventLoop, PostWakesASleepingTurn) {
  EventLoop loop;
  bool ran = false;
  const auto start = Clock::now();
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(30));
    loop.post([&] { ran = true; });
  });
  while (!ran) loop.turn(kLong);
  other.join();
  EXPECT_LT(Clock::now() - start, kLong);
}

TEST(EventLoop, WakesByItsDoorbellToo) {
  EventLoop loop;
  const std::uint64_t one = 1;
  ASSERT_EQ(::write(loop.doorbell(), &one, sizeof one), ssize_t{sizeof one});
  const auto start = Clock::now();
  loop.turn(kLong);
  loop.wake();
  loop.turn(kLong);
  EXPECT_LT(Clock::now() - start, kLong);
  EXPECT_EQ(loop.turn(Duration::zero()), 0);  // it was answered and is silent now
}

TEST(EventLoop, KeepsEveryFunctionOfManyThreads) {
  EventLoop loop;
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  std::vector<int> next(kThreads);
  int ran = 0;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        loop.post([&, t, i] {
          EXPECT_EQ(next[t]++, i);
          ++ran;
        });
      }
    });
  }
  while (ran < kThreads * kEach) loop.turn(kLong);
  for (auto& thread : threads) thread.join();
}

TEST(EventLoop, SleepsNoLongerThanAsked) {
  EventLoop loop;
  const auto start = Clock::now();
  EXPECT_EQ(loop.turn(milliseconds(20)), 0);
  EXPECT_GE(Clock::now() - start, milliseconds(20));
  EXPECT_LT(Clock::now() - start, kLong);
}

TEST(EventLoop, RunsTimersEveryPeriod) {
  EventLoop loop;
  int ticks = 0;
  const auto start = Clock::now();
  const Timer timer = loop.every(0.01, [&] { ++ticks; });
  const int early = loop.turn(Duration::zero());
  if (Clock::now() - start < milliseconds(10)) {
    EXPECT_EQ(early, 0) << "not before one period has passed";
  }
  while (ticks < 3) loop.turn(kLong);  // and a sleeping turn wakes for it
  EXPECT_GE(Clock::now() - start, milliseconds(30));
  EXPECT_LT(Clock::now() - start, kLong);
}

TEST(EventLoop, ADestroyedTimerIsNotCalled) {
  EventLoop loop;
  int ticks = 0;
  Timer timer = loop.every(0.005, [&] { ++ticks; });
  while (ticks < 2) loop.turn(kLong);
  timer = Timer();
  loop.turn(milliseconds(30));
  EXPECT_EQ(ticks, 2);
}

TEST(EventLoop, ATimerMayDestroyItselfAndOthersFromItsTask) {
  EventLoop loop;
  int ticks = 0;
  Timer other;
  auto own = std::make_unique<Timer>();
  const auto guard = std::make_shared<int>(7);
  *own = loop.every(0.005, [&, guard] {
    own.reset();
    other = Timer();
    ticks += *guard;  // what the task holds lives until it returns
  });
  other = loop.every(0.005, [&] { ticks += 100; });
  const Timer end = loop.after(0.04, [&] { ticks += 1000; });
  while (ticks < 1000) loop.turn(kLong);
  EXPECT_EQ(ticks, 1007);
  EXPECT_EQ(guard.use_count(), 1) << "the task is gone with its timer";
}

TEST(EventLoop, AfterCallsOnce) {
  EventLoop loop;
  int calls = 0;
  const Timer once = loop.after(0.005, [&] { ++calls; });
  while (calls == 0) loop.turn(kLong);
  const auto start = Clock::now();
  while (Clock::now() - start < milliseconds(40)) loop.turn(milliseconds(10));
  EXPECT_EQ(calls, 1);
}

TEST(EventLoop, ATimerMayOutliveItsLoop) {
  Timer timer;
  {
    EventLoop loop;
    timer = loop.every(0.005, [] {});
  }
}

}  // namespace
}  // namespace bps
