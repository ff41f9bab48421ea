// SPDX-License-Identifier: Apache-2.0
#include "server/slot_window.h"

#include <gtest/gtest.h>

#include "server/fake_transport.h"

namespace bps::server {
namespace {

constexpr std::uint64_t kLarge = 100'000;
constexpr std::uint32_t kSmallSlots = 128;

class SlotWindowTest : public ::testing::Test {
 protected:
  std::vector<tensor::SlotCredit> announced() {
    std::vector<tensor::SlotCredit> slots;
    control.messages.clear();
    transport::ControlPaths paths;
    paths.add(&control);
    window.send_credits(paths);
    for (const auto& message : control.sent<tensor::Credits>()) {
      slots.insert(slots.end(), message.slots.begin(), message.slots.end());
    }
    return slots;
  }
  // The large slots that the worker holds, in the order of their grants.
  std::vector<Slot*> large_slots(const std::vector<tensor::SlotCredit>& credits) {
    std::vector<Slot*> slots;
    for (const tensor::SlotCredit& credit : credits) {
      if (!tensor::is_small_slot(credit.capacity)) slots.push_back(pool.by_number(credit.slot));
    }
    return slots;
  }

  FakeTransport transport;
  SlotPool pool{{&transport}};
  SendsDue due;
  SlotWindow window{pool, transport, due, 1};
  FakeControl control{transport::Hello{}};
  FakeData data{transport::Hello{}};
};

TEST_F(SlotWindowTest, AnnouncesEachGrantOnce) {
  EXPECT_FALSE(due.credits);
  window.open(kLarge, 8, 0);
  EXPECT_TRUE(due.credits);
  const auto first = announced();
  EXPECT_EQ(first.size(), 8 + kSmallSlots);
  EXPECT_EQ(large_slots(first).size(), 8U);
  EXPECT_TRUE(announced().empty());
}

TEST_F(SlotWindowTest, AnnouncesALargeSlotAtOnceAndSmallOnesTogether) {
  window.open(kLarge, 2, 0);
  const auto first = announced();
  Slot* large = large_slots(first).front();
  due.credits = false;
  window.fill(*large, data);
  SlotWindow::release(large, pool);
  EXPECT_TRUE(due.credits);
  EXPECT_EQ(announced().size(), 1U);
  due.credits = false;

  std::vector<Slot*> small;
  for (const tensor::SlotCredit& credit : first) {
    if (tensor::is_small_slot(credit.capacity)) small.push_back(pool.by_number(credit.slot));
  }
  for (std::uint32_t i = 0; i < kSmallSlots / 2 - 1; ++i) {
    window.fill(*small[i], data);
    SlotWindow::release(small[i], pool);
    ASSERT_FALSE(due.credits) << "the worker has " << kSmallSlots - i - 1 << " left";
    ASSERT_TRUE(announced().empty());
  }
  window.fill(*small.back(), data);
  SlotWindow::release(small.back(), pool);
  EXPECT_TRUE(due.credits) << "as many are free that it has not heard of as it has left";
  EXPECT_EQ(announced().size(), kSmallSlots / 2);
}

TEST_F(SlotWindowTest, AWorkerIsToldOfFreeSlotsBeforeItHasNone) {
  window.open(4000, 1, 0);
  const auto credits = announced();
  std::vector<Slot*> slots;
  for (const tensor::SlotCredit& credit : credits) {
    if (tensor::is_small_slot(credit.capacity)) slots.push_back(pool.by_number(credit.slot));
  }
  window.fill(*slots[0], data);
  SlotWindow::release(slots[0], pool);  // the only one that comes back: others wait for other workers
  for (std::size_t i = 1; i < slots.size() - 1; ++i) window.fill(*slots[i], data);
  EXPECT_TRUE(due.credits);
  EXPECT_EQ(announced().size(), 1U);
}

TEST_F(SlotWindowTest, SplitsCreditsThatDoNotFitIntoOneMessage) {
  window.open(4000, 5000, 0);
  EXPECT_EQ(announced().size(), 5000 + kSmallSlots);
  EXPECT_GT(control.messages.size(), 1U);
}

TEST_F(SlotWindowTest, CreditsBringTheKeysOfEveryRail) {
  transport.rails = 3;
  window.open(4000, 5000, 0);
  transport::ControlPaths paths;
  paths.add(&control);
  window.send_credits(paths);
  const auto messages = control.sent<tensor::Credits>();
  EXPECT_GT(messages.size(), 1U);
  std::size_t slots = 0;
  for (const tensor::Credits& message : messages) {
    slots += message.slots.size();
    ASSERT_EQ(message.other_keys.size(), 2 * message.slots.size());
    for (std::size_t i = 0; i < message.slots.size(); ++i) {
      EXPECT_EQ(message.slots[i].key, 0U);
      EXPECT_EQ(message.other_keys[2 * i], 1U);
      EXPECT_EQ(message.other_keys[2 * i + 1], 2U);
    }
    EXPECT_LE(encode(message, 1).size(), transport::kMaxMessage);
  }
  EXPECT_EQ(slots, 5000 + kSmallSlots);
}

TEST_F(SlotWindowTest, AShareOfTheMemoryLimitsBothSizes) {
  window.open(kLarge, 8, 400'000);
  const auto credits = announced();
  EXPECT_EQ(large_slots(credits).size(), 3U);
  EXPECT_EQ(credits.size(), 3U + 8U);
}

TEST_F(SlotWindowTest, AWorkerMayWriteIntoWhatItWasGrantedAndNowhereElse) {
  window.open(kLarge, 2, 0);
  const auto credits = announced();
  const tensor::SlotCredit& mine = *std::ranges::find(
      credits, false, [](const tensor::SlotCredit& credit) { return tensor::is_small_slot(credit.capacity); });
  Slot* slot = pool.by_number(mine.slot);
  const transport::RemoteSpan granted{mine.key, mine.address, mine.capacity};
  EXPECT_FALSE(window.begin_fill(*slot, data, {mine.key, mine.address, mine.capacity + 1}));
  EXPECT_FALSE(window.begin_fill(*slot, data, {mine.key, mine.address + 1, 1}))
      << "in the slot, but not at its beginning";
  EXPECT_FALSE(window.begin_fill(*slot, data, {mine.key + 1, mine.address, 1}));
  SlotWindow other(pool, transport, due, 1);
  EXPECT_FALSE(other.begin_fill(*slot, data, granted)) << "it is another worker's";
  EXPECT_TRUE(window.begin_fill(*slot, data, {mine.key, mine.address, 1}));
  EXPECT_TRUE(window.fill(*slot, data));
  EXPECT_FALSE(window.begin_fill(*slot, data, granted)) << "its bytes are in use";
}

TEST_F(SlotWindowTest, OneWriteAtATimeArrivesInASlot) {
  window.open(kLarge, 1, 0);
  const tensor::SlotCredit mine = announced().front();
  Slot* slot = pool.by_number(mine.slot);
  const transport::RemoteSpan granted{mine.key, mine.address, mine.capacity};
  const FakeData second{transport::Hello{}};
  EXPECT_TRUE(window.begin_fill(*slot, data, granted));
  EXPECT_FALSE(window.begin_fill(*slot, second, granted)) << "its bytes would arrive in a slot that may serve others";
  EXPECT_FALSE(window.fill(*slot, second)) << "and a bare immediate would end the first write before its time";
  EXPECT_TRUE(window.fill(*slot, data));
  SlotWindow::release(slot, pool);
  EXPECT_TRUE(window.begin_fill(*slot, second, granted)) << "a new grant";
}

TEST_F(SlotWindowTest, ASlotIsFilledOncePerGrantAndByItsWorkerOnly) {
  window.open(kLarge, 2, 0);
  Slot* slot = large_slots(announced()).front();
  SlotWindow other(pool, transport, due, 1);
  EXPECT_FALSE(other.fill(*slot, data));
  EXPECT_TRUE(window.fill(*slot, data));
  EXPECT_FALSE(window.fill(*slot, data)) << "its bytes are in use";
  SlotWindow::release(slot, pool);
  const auto again = announced();
  ASSERT_EQ(again.size(), 1U);
  EXPECT_EQ(again[0].slot, slot->number);
  EXPECT_TRUE(window.fill(*slot, data));
}

TEST_F(SlotWindowTest, AWorkerWithLargePartitionsStarvesWithoutALargeSlot) {
  EXPECT_FALSE(window.is_starved()) << "it needs no slots";
  window.open(kLarge, 2, 0);
  const auto slots = large_slots(announced());
  window.fill(*slots[0], data);
  EXPECT_FALSE(window.is_starved());
  EXPECT_FALSE(window.has_run_out(*slots[0]));
  window.fill(*slots[1], data);
  EXPECT_TRUE(window.is_starved()) << "small slots do not help it";
  EXPECT_TRUE(window.has_run_out(*slots[1]));
  SlotWindow::release(slots[0], pool);
  EXPECT_FALSE(window.is_starved());
}

TEST_F(SlotWindowTest, AWorkerWithSmallPartitionsStarvesWithoutAnySlot) {
  window.open(4000, 1, 0);
  const auto credits = announced();
  for (std::size_t i = 0; i < credits.size(); ++i) {
    EXPECT_FALSE(window.is_starved()) << i;
    window.fill(*pool.by_number(credits[i].slot), data);
  }
  EXPECT_TRUE(window.is_starved());
}

TEST_F(SlotWindowTest, AnOverflowSlotIsUsedOnce) {
  window.open(kLarge, 1, 0);
  Slot* own = large_slots(announced()).front();
  window.fill(*own, data);
  const std::uint64_t before = pool.bytes();
  for (int i = 0; i < 100; ++i) {
    window.grant_overflow();
    EXPECT_FALSE(window.is_starved());
    const auto extra = large_slots(announced());
    ASSERT_EQ(extra.size(), 1U);
    ASSERT_TRUE(window.fill(*extra[0], data));
    SlotWindow::release(extra[0], pool);
    EXPECT_TRUE(announced().empty()) << "it went back to the pool";
    EXPECT_TRUE(window.is_starved());
  }
  EXPECT_EQ(pool.bytes(), before) << "one slot served a hundred times";
}

TEST_F(SlotWindowTest, ALostWorkersSlotsServeOthers) {
  window.open(kLarge, 20, 0);
  Slot* in_use = large_slots(announced()).front();
  window.fill(*in_use, data);
  const std::uint64_t before = pool.bytes();
  window.close();
  EXPECT_FALSE(window.is_starved());
  SlotWindow::release(in_use, pool);
  EXPECT_TRUE(announced().empty());
  SlotWindow other(pool, transport, due, 1);
  other.open(kLarge, 20, 0);
  EXPECT_EQ(pool.bytes(), before);
}

TEST_F(SlotWindowTest, OnlyOpeningAndOverflowGrowThePool) {
  EXPECT_EQ(pool.take(kLarge), nullptr);
  EXPECT_EQ(pool.bytes(), 0U);
  transport.out_of_memory = true;
  EXPECT_THROW(window.open(kLarge, 1, 0), Error);
  EXPECT_THROW(window.grant_overflow(), Error);
  EXPECT_EQ(pool.bytes(), 0U);
}

}  // namespace
}  // namespace bps::server
