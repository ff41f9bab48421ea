// SPDX-License-Identifier: Apache-2.0
// A reactor that is worked by its thread and by callers in turn.
#include "transport/progress.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "core/ring.h"
#include "transport/reactor.h"

namespace bps::transport::testing {
namespace {

// Counts what it is given, and who works when; not thread-safe, as actors are.
class Adder final : public Actor {
 public:
  bool step() override {
    int value = 0;
    bool found = false;
    while (work.pop(value)) {
      sum += value;
      ++count;
      workers.insert(std::this_thread::get_id());
      found = true;
    }
    done.store(count, std::memory_order_release);
    return found;
  }
  bool arm() override { return work.empty(); }

  MpscRing<int> work{1 << 10};
  long sum = 0;
  long count = 0;
  std::set<std::thread::id> workers;
  std::atomic<long> done{0};
};

class ProgressTest : public ::testing::Test {
 protected:
  void start(Spin spin) {
    reactor = std::make_unique<Reactor>("test", spin);
    reactor->add(&adder);
    reactor->start();
  }
  void put(int value) {
    while (!adder.work.push(std::move(value))) std::this_thread::yield();
  }
  bool comes_to(long count) {
    const Deadline deadline = Deadline::after(20);
    while (adder.done.load(std::memory_order_acquire) < count && !deadline.passed()) std::this_thread::yield();
    return adder.done.load() == count;
  }
  // Until the thread has gone to sleep and left the progress.
  void settle() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

  Adder adder;
  std::unique_ptr<Reactor> reactor;
};

TEST_F(ProgressTest, ACallerWorksOnTheSpotAndTheThreadSleepsOn) {
  start({});
  settle();
  const auto before = reactor->counters().wakeups.get();
  for (int i = 1; i <= 100; ++i) {
    put(i);
    EXPECT_TRUE(reactor->progress()->progress_until([&] { return adder.done.load() == i; }));
  }
  EXPECT_EQ(adder.sum, 5050);
  EXPECT_EQ(adder.workers, std::set{std::this_thread::get_id()});
  EXPECT_LE(reactor->counters().wakeups.get(), before + 1) << "its timer, at most";
}

TEST_F(ProgressTest, ANudgeWakesTheThreadAlsoAfterACallerHasLeft) {
  start({});
  for (int i = 1; i <= 200; ++i) {
    put(1);
    if (i % 2 == 0) {
      reactor->progress()->wake();
    } else if (!reactor->progress()->progress_until([&] { return adder.done.load() == i; })) {
      ASSERT_TRUE(comes_to(i)) << "somebody else was at it and must see it";
    }
    ASSERT_TRUE(comes_to(i)) << i;
  }
}

TEST_F(ProgressTest, ACallerGivesUpAfterItsSpinAndWorkThatComesLaterIsDone) {
  start({.thread_us = 0, .caller_us = 1000});
  settle();
  EXPECT_FALSE(reactor->progress()->progress_until([] { return false; }));
  put(7);
  reactor->progress()->wake();
  EXPECT_TRUE(comes_to(1));
}

TEST_F(ProgressTest, TasksAndCallsRunWhileACallerMakesProgress) {
  start({});
  settle();
  put(1);
  int answer = 0;
  EXPECT_TRUE(reactor->progress()->progress_until([&] {
    answer = reactor->call([] { return 42; });  // would wait for ourselves, were it posted
    return true;
  }));
  EXPECT_EQ(answer, 42);
  EXPECT_EQ(reactor->call([] { return 43; }), 43);
  // From what the thread itself runs: a task, and a timer.
  EXPECT_EQ(reactor->call([&] { return reactor->call([] { return 44; }); }), 44);
  std::atomic<int> told{0};
  Timer timer;
  reactor->call([&] { timer = reactor->loop().every(0.01, [&] { told = reactor->call([] { return 45; }); }); });
  const Deadline deadline = Deadline::after(20);
  while (told == 0 && !deadline.passed()) std::this_thread::yield();
  EXPECT_EQ(told, 45);
  reactor.reset();  // before what its timer writes into
}

TEST_F(ProgressTest, NothingIsLostBetweenManyCallersAndTheThread) {
  for (const Spin spin : {Spin{}, Spin{.thread_us = 20, .caller_us = 20}}) {
    adder.done = adder.count = adder.sum = 0;
    start(spin);
    constexpr int kEach = 3000;
    std::vector<std::thread> callers;
    for (int t = 0; t < 3; ++t) {
      callers.emplace_back([&, t] {
        for (int i = 0; i < kEach; ++i) {
          put(1);
          if ((i + t) % 3 == 0) {
            reactor->progress()->wake();
          } else {
            reactor->progress()->progress_until([n = 0]() mutable { return ++n > 2; });
          }
        }
      });
    }
    for (auto& caller : callers) caller.join();
    EXPECT_TRUE(comes_to(3 * kEach));
    EXPECT_EQ(adder.sum, 3 * kEach);
    reactor.reset();
  }
}

TEST_F(ProgressTest, AProgressLockOutlivesItsReactor) {
  start({.thread_us = 0, .caller_us = 10'000'000});
  settle();
  const std::shared_ptr<ProgressLock> progress = reactor->progress();
  std::atomic<bool> driving{false};
  std::thread caller([&] {
    progress->progress_until([&] {
      driving = true;
      return false;
    });
  });
  while (!driving) std::this_thread::yield();
  reactor.reset();  // makes the caller leave, and waits for that
  caller.join();
  EXPECT_FALSE(progress->progress_until([] { return false; }));
  progress->wake();
}

}  // namespace
}  // namespace bps::transport::testing
