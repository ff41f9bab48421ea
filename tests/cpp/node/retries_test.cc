// SPDX-License-Identifier: Apache-2.0
#include "node/retries.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace bps::node {
namespace {

// In each test `retries` is last, and so the first to go: it waits for the task, which still reads the others after it
// has told the test that it is done.

TEST(Retries, ATaskIsTriedUntilItWorks) {
  std::promise<int> worked;
  int tries = 0;  // on the one thread
  Retries retries;
  retries.add({1, 2, 3}, [&] {
    if (++tries < 3) return false;
    worked.set_value(tries);
    return true;
  });
  EXPECT_EQ(worked.get_future().get(), 3);
}

TEST(Retries, OneKeyIsTriedOnceAtATime) {
  std::promise<void> done;
  std::atomic<int> second{0};
  Retries retries;
  retries.add({1, 0, 0}, [&] {
    done.set_value();
    return true;
  });
  retries.add({1, 0, 0}, [&] {
    ++second;
    return true;
  });
  done.get_future().wait();
  retries.stop();
  EXPECT_EQ(second, 0);
}

TEST(Retries, WhatFailsAgainBeforeItsTaskHasReturnedIsTriedAgain) {
  std::promise<void> second;
  int tries = 0;
  Retries retries;
  retries.add({1, 0, 0}, [&] {
    if (++tries == 2) second.set_value();
    if (tries == 1) retries.add({1, 0, 0}, [] { return true; });
    return true;
  });
  second.get_future().wait();
}

TEST(Retries, AfterStopNothingIsTried) {
  std::atomic<int> tries{0};
  Retries retries;
  const auto fails = [&] {
    ++tries;
    return false;
  };
  retries.add({1, 0, 0}, fails);
  retries.stop();
  const int before = tries;
  retries.add({2, 0, 0}, fails);
  retries.stop();
  EXPECT_EQ(tries, before);
}

}  // namespace
}  // namespace bps::node
