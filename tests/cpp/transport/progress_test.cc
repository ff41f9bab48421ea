// SPDX-License-Identifier: Apache-2.0
// A reactor that is worked by its thread and by callers in turn.
#include "transport/progress.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "core/ring.h"
#include "eventually.h"
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
    if (found && on_count) on_count();
    return found;
  }
  bool arm() override { return work.empty(); }

  MpscRing<int> work{1 << 10};
  std::function<void()> on_count;
  long sum = 0;
  long count = 0;
  std::set<std::thread::id> workers;
  std::atomic<long> done{0};
};

using Outcome = ProgressLock::Outcome;
constexpr Duration kSlice = std::chrono::milliseconds(50);
constexpr Duration kLong = std::chrono::seconds(60);

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
    const auto is_there = [&] { return adder.done.load(std::memory_order_acquire) >= count; };
    return eventually(is_there, 20) && adder.done.load() == count;
  }
  // Until the thread has gone to sleep and left the progress.
  void settle() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

  Adder adder;
  std::unique_ptr<Reactor> reactor;
};

// On a busy machine the thread may be late to sleep, or its timer wakes it just then.
TEST_F(ProgressTest, ACallerWorksOnTheSpotAndTheThreadSleepsOn) {
  start({});
  const auto does_it_alone = [&] {
    settle();
    const long first = adder.done;
    const auto before = reactor->counters().wakeups.get();
    bool alone = true;
    for (long i = 1; i <= 100; ++i) {
      put(1);
      const auto is_done = [&] { return adder.done.load() == first + i; };
      alone &= reactor->progress()->progress_until(is_done, kLong) == Outcome::kDone;
      if (!comes_to(first + i)) return false;
    }
    const bool by_me =
        reactor->call([&] { return std::exchange(adder.workers, {}); }) == std::set{std::this_thread::get_id()};
    return alone && by_me && reactor->counters().wakeups.get() <= before + 2;  // for its timer, and the call
  };
  EXPECT_TRUE(eventually(does_it_alone, 20));
}

TEST_F(ProgressTest, ANudgeWakesTheThreadAlsoAfterACallerHasLeft) {
  start({});
  for (int i = 1; i <= 200; ++i) {
    put(1);
    if (i % 2 == 0) {
      reactor->progress()->wake();
    } else if (reactor->progress()->progress_until([&] { return adder.done.load() == i; }, kLong) != Outcome::kDone) {
      ASSERT_TRUE(comes_to(i)) << "somebody else was at it and must see it";
    }
    ASSERT_TRUE(comes_to(i)) << i;
  }
}

TEST_F(ProgressTest, ACallerComesBackAfterAWhileAndWorkThatComesLaterIsDone) {
  start({.thread_us = 0, .caller_us = 1000});
  settle();
  EXPECT_EQ(reactor->progress()->progress_until([] { return false; }, kSlice), Outcome::kComeBack);
  put(7);
  reactor->progress()->wake();
  EXPECT_TRUE(comes_to(1));
}

// Whether the caller or the thread is woken is for the kernel to say; that the caller hears of it is for us.
TEST_F(ProgressTest, ACallerThatSleepsIsWokenByWorkWhoeverDoesIt) {
  adder.on_count = [&] { reactor->progress()->call_back(); };
  start({});
  std::atomic<long> seen{0};
  std::thread caller([&] {
    for (long i = 1; i <= 200; ++i) {
      while (reactor->progress()->progress_until([&] { return adder.done.load() >= i; }, kLong) != Outcome::kDone) {
        std::this_thread::yield();
      }
      seen = i;
    }
  });
  for (long i = 1; i <= 200; ++i) {
    if (i % 50 == 0) settle();  // both are asleep
    if (i % 3 == 0) {
      // On the thread, or on the caller: the one that is woken.
      reactor->call([&] {
        put(1);
        adder.step();
      });
    } else {
      put(1);
      reactor->progress()->wake();
    }
    if (!eventually([&] { return seen >= i; }, 50)) break;
  }
  EXPECT_EQ(seen, 200);
  caller.join();
}

// The thread has gone to sleep after the caller has, and so is woken before it.
TEST_F(ProgressTest, TheThreadCallsTheCallerBack) {
  adder.on_count = [&] { reactor->progress()->call_back(); };
  start({});
  settle();
  std::atomic<int> asleep{0};
  std::thread caller([&] {
    EXPECT_EQ(reactor->progress()->progress_until(
                  [&] {
                    ++asleep;
                    return adder.done.load() == 1;
                  },
                  kLong),
              Outcome::kDone);
  });
  EXPECT_TRUE(eventually([&] { return asleep > 0; }, 20));
  std::this_thread::sleep_for(std::chrono::milliseconds(600));  // longer than the thread sleeps at a time
  put(1);
  reactor->progress()->wake();
  caller.join();
  EXPECT_EQ(adder.done, 1);
}

TEST_F(ProgressTest, OneCallerSleepsAndOthersLeaveTheirWorkToIt) {
  start({});
  settle();
  std::atomic<bool> driving{false};
  std::thread caller([&] {
    const auto both = [&] {
      driving = true;
      return adder.done.load() == 2;
    };
    while (reactor->progress()->progress_until(both, kLong) != Outcome::kDone) std::this_thread::yield();
  });
  while (!driving) std::this_thread::yield();
  settle();
  put(1);
  // On a busy machine it may be between two calls at this moment.
  const auto leaves = [&] {
    return reactor->progress()->progress_until([] { return false; }, kSlice) == Outcome::kElsewhere;
  };
  EXPECT_TRUE(eventually(leaves, 20, kAtOnce));
  EXPECT_TRUE(comes_to(1));
  put(1);
  reactor->progress()->wake();
  caller.join();
}

TEST_F(ProgressTest, ACallerThatSleepsLeavesWhenTheReactorEnds) {
  for (int i = 0; i < 20; ++i) {
    start({});
    if (i % 2 == 0) settle();
    const std::shared_ptr<ProgressLock> progress = reactor->progress();
    std::atomic<bool> driving{false};
    std::thread caller([&] {
      const auto never = [&] {
        driving = true;
        return false;
      };
      while (progress->progress_until(never, kLong) != Outcome::kElsewhere || !driving) std::this_thread::yield();
    });
    while (!driving) std::this_thread::yield();
    if (i % 4 == 0) settle();
    const auto start = Clock::now();
    reactor.reset();
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
    caller.join();
  }
}

TEST_F(ProgressTest, TasksAndCallsRunWhileACallerMakesProgress) {
  start({});
  settle();
  put(1);
  int answer = 0;
  const auto ask = [&] {
    answer = reactor->call([] { return 42; });  // would wait for ourselves, were it posted
    return true;
  };
  EXPECT_EQ(reactor->progress()->progress_until(ask, kLong), Outcome::kDone);
  EXPECT_EQ(answer, 42);
  EXPECT_EQ(reactor->call([] { return 43; }), 43);
  // From what the thread itself runs: a task, and a timer.
  EXPECT_EQ(reactor->call([&] { return reactor->call([] { return 44; }); }), 44);
  std::atomic<int> told{0};
  Timer timer;
  reactor->call([&] { timer = reactor->loop().every(0.01, [&] { told = reactor->call([] { return 45; }); }); });
  EXPECT_TRUE(eventually([&] { return told == 45; }, 20));
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
            reactor->progress()->progress_until([n = 0]() mutable { return ++n > 2; }, Duration::zero());
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

// Neither the thread nor other callers are kept from their work by it.
TEST_F(ProgressTest, AnExceptionLeavesTheProgressToOthers) {
  start({.thread_us = 0, .caller_us = 0});
  settle();
  struct Failed {};
  Timer timer;
  const std::thread::id here = std::this_thread::get_id();
  std::atomic<bool> thrown{false};
  reactor->call([&] {
    timer = reactor->loop().every(0.01, [&] {  // within the sleep
      if (std::this_thread::get_id() == here && !thrown.exchange(true)) throw Failed();
    });
  });
  const auto never = [] { return false; };
  const auto is_thrown = [&] {
    try {
      (void)reactor->progress()->progress_until(never, kSlice);
    } catch (const Failed&) {
    }
    return thrown.load();
  };
  EXPECT_TRUE(eventually(is_thrown, 20, kAtOnce));
  // A call of this thread is none of a caller that makes progress any more, and it may be one again.
  EXPECT_NE(reactor->call([] { return std::this_thread::get_id(); }), here);
  const auto is_done = [&] {
    return reactor->progress()->progress_until([n = 0]() mutable { return ++n > 2; }, kSlice) == Outcome::kDone;
  };
  EXPECT_TRUE(eventually(is_done, 20, kAtOnce));
  reactor.reset();  // before its timer's task
}

TEST_F(ProgressTest, AProgressLockOutlivesItsReactor) {
  start({.thread_us = 0, .caller_us = 10'000'000});
  settle();
  const std::shared_ptr<ProgressLock> progress = reactor->progress();
  std::atomic<bool> driving{false};
  std::thread caller([&] {
    const auto never = [&] {
      driving = true;
      return false;
    };
    progress->progress_until(never, kLong);
  });
  while (!driving) std::this_thread::yield();
  reactor.reset();  // makes the caller leave, and waits for that
  caller.join();
  EXPECT_EQ(progress->progress_until([] { return false; }, kLong), Outcome::kElsewhere);
  progress->wake();
}

}  // namespace
}  // namespace bps::transport::testing
