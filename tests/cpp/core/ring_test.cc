// SPDX-License-Identifier: Apache-2.0
#include "core/ring.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

namespace bps {
namespace {

TEST(MpscRing, KeepsOrderOverManyTurns) {
  MpscRing<int> ring(4);
  int next = 0;
  int expected = 0;
  for (int round = 0; round < 100; ++round) {
    for (int i = 0; i < 1 + round % 4; ++i) ASSERT_TRUE(ring.push(next++));
    for (int i = 0; i < 1 + round % 4; ++i) {
      int value = -1;
      ASSERT_TRUE(ring.pop(value));
      ASSERT_EQ(value, expected++);
    }
    ASSERT_TRUE(ring.empty());
  }
}

TEST(MpscRing, RefusesWhenFullAndLeavesTheValueAlone) {
  MpscRing<std::unique_ptr<int>> ring(2);
  EXPECT_TRUE(ring.empty());
  EXPECT_TRUE(ring.push(std::make_unique<int>(1)));
  EXPECT_TRUE(ring.push(std::make_unique<int>(2)));
  auto third = std::make_unique<int>(3);
  EXPECT_FALSE(ring.push(std::move(third)));
  ASSERT_NE(third, nullptr);
  std::unique_ptr<int> value;
  ASSERT_TRUE(ring.pop(value));
  EXPECT_EQ(*value, 1);
  EXPECT_TRUE(ring.push(std::move(third)));
  ASSERT_TRUE(ring.pop(value));
  ASSERT_TRUE(ring.pop(value));
  EXPECT_EQ(*value, 3);
  EXPECT_FALSE(ring.pop(value));
}

TEST(MpscRing, RoundsItsCapacityUp) {
  MpscRing<int> ring(5);
  int accepted = 0;
  while (ring.push(int{accepted})) ++accepted;
  EXPECT_EQ(accepted, 8);
}

// A small ring, so that producers meet each other, the consumer and the full state all the time.
TEST(MpscRing, LosesNothingAndKeepsEachProducersOrder) {
  struct Item {
    int producer = -1;
    int number = -1;
  };
  constexpr int kProducers = 4;
  constexpr int kItems = 20'000;
  MpscRing<Item> ring(64);
  std::vector<std::thread> producers;
  for (int p = 0; p < kProducers; ++p) {
    producers.emplace_back([&ring, p] {
      for (int i = 0; i < kItems; ++i) {
        while (!ring.push({p, i})) std::this_thread::yield();
      }
    });
  }
  std::vector<int> next(kProducers);
  int out_of_order = 0;
  for (int taken = 0; taken < kProducers * kItems;) {
    Item item;
    if (!ring.pop(item)) {
      std::this_thread::yield();
      continue;
    }
    ++taken;
    if (next.at(static_cast<std::size_t>(item.producer))++ != item.number) ++out_of_order;
  }
  for (auto& producer : producers) producer.join();
  EXPECT_EQ(out_of_order, 0);
  EXPECT_EQ(next, std::vector<int>(kProducers, kItems));
  EXPECT_TRUE(ring.empty());
}

}  // namespace
}  // namespace bps
