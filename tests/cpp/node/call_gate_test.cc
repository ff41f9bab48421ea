// SPDX-License-Identifier: Apache-2.0
#include "node/call_gate.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "child_process.h"
#include "core/error.h"

namespace bps::node {
namespace {

using After = CallGate::After;

const auto kSoon = [] { return Deadline::after(20); };

bool is_refused(CallGate& gate) {
  try {
    const CallGate::Call call(gate);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotInitialized);
    return true;
  }
  return false;
}

TEST(CallGate, RefusesOnceClosed) {
  CallGate gate;
  EXPECT_FALSE(is_refused(gate));
  EXPECT_TRUE(gate.close(After::kNothing));
  EXPECT_FALSE(gate.close(After::kNothing)) << "somebody else closes it";
  EXPECT_TRUE(is_refused(gate));
  int ran = 0;
  gate.run_when_empty([&] { ++ran; }, kSoon());
  EXPECT_TRUE(is_refused(gate));
  EXPECT_EQ(ran, 1);
}

TEST(CallGate, SaysWhereCallsGoOn) {
  CallGate gate;
  EXPECT_TRUE(gate.close(After::kNextView));
  EXPECT_FALSE(gate.close(After::kNothing));
  int ran = 0;
  gate.run_when_empty([&] { ++ran; }, kSoon());
  EXPECT_EQ(ran, 1);
  try {
    const CallGate::Call call(gate);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRoundAborted);
  }
}

TEST(CallGate, TheTaskWaitsForTheCallsOfOtherThreads) {
  for (int round = 0; round < 200; ++round) {
    CallGate gate;
    std::vector<int> used(4, 0);
    bool torn_down = false;
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < used.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          for (;;) {
            const CallGate::Call call(gate);
            EXPECT_FALSE(torn_down);  // under the thread checker: no race with the task either
            ++used[i];
          }
        } catch (const Error&) {
        }
      });
    }
    std::this_thread::yield();
    gate.close(After::kNothing);
    gate.run_when_empty([&] { torn_down = true; }, kSoon());
    for (auto& thread : threads) thread.join();
    EXPECT_TRUE(torn_down);
  }
}

TEST(CallGate, ACallOfTheSameThreadRunsTheTaskAtItsEnd) {
  CallGate gate;
  CallGate other;
  int ran = 0;
  {
    const CallGate::Call outer(gate);
    const CallGate::Call elsewhere(other);
    {
      const CallGate::Call inner(gate);
      gate.close(After::kNothing);
      gate.run_when_empty([&] { ++ran; }, kSoon());  // as in a signal handler; must not wait for itself
    }
    EXPECT_EQ(ran, 0);
  }
  EXPECT_EQ(ran, 1);
}

TEST(CallGate, AfterTheDeadlineTheLastCallRunsTheTask) {
  CallGate gate;
  std::atomic<bool> inside{false}, go{false};
  std::thread::id ran_on;
  std::thread stuck([&] {
    const CallGate::Call call(gate);
    inside = true;
    while (!go) std::this_thread::yield();
  });
  while (!inside) std::this_thread::yield();
  const auto id = stuck.get_id();
  gate.close(After::kNothing);
  gate.run_when_empty([&] { ran_on = std::this_thread::get_id(); }, Deadline::after(0.01));
  EXPECT_EQ(ran_on, std::thread::id());
  go = true;
  stuck.join();
  EXPECT_EQ(ran_on, id);
}

TEST(CallGate, AForkedProcessIsRefused) {
  CallGate gate;
  EXPECT_TRUE(ChildProcess([&] { return is_refused(gate); }).ends_well());
  EXPECT_FALSE(is_refused(gate));
}

}  // namespace
}  // namespace bps::node
