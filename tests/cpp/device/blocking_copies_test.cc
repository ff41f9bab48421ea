// SPDX-License-Identifier: Apache-2.0
// Copies for which the caller waits, on the fake driver: of several blocks, behind a point, and refused.
#include "device/blocking_copies.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "core/error.h"
#include "device/fake_device.h"
#include "worker/callers_memory.h"

namespace bps::device {
namespace {

constexpr std::size_t kSeveralBlocks = (9 << 20) + 5;  // two blocks, and a part of one

class BlockingCopiesTest : public ::testing::Test {
 protected:
  BlockingCopiesTest() {
    FAKE(fake_delay)(200);
    for (std::size_t i = 0; i < kSeveralBlocks; ++i) host[i] = static_cast<std::byte>(i * 7 + i / 251);
  }
  ~BlockingCopiesTest() override {
    FAKE(fake_free)(memory);
    FAKE(fake_free)(other);
  }

  Device& device = testing::only_device();
  std::vector<std::byte> host = std::vector<std::byte>(kSeveralBlocks);
  std::byte* const memory = static_cast<std::byte*>(FAKE(fake_allocate)(kSeveralBlocks));
  std::byte* const other = static_cast<std::byte*>(FAKE(fake_allocate)(kSeveralBlocks));
};

TEST_F(BlockingCopiesTest, HaveEndedWhenTheyReturn) {
  const int streams = FAKE(fake_streams)(), pinned = FAKE(fake_pinned)();
  {
    BlockingCopies copies(device, {});
    copies.to_device(memory, host);
    copies.within(other, memory, kSeveralBlocks);
    std::vector<std::byte> found(kSeveralBlocks);
    FAKE(fake_read)(other, found.data(), kSeveralBlocks);
    EXPECT_EQ(found, host);
    std::vector<std::byte> back(kSeveralBlocks);
    copies.to_host(back, other);
    EXPECT_EQ(back, host);
  }
  EXPECT_EQ(FAKE(fake_streams)(), streams);
  EXPECT_EQ(FAKE(fake_pinned)(), pinned);
}

TEST_F(BlockingCopiesTest, WaitForAPoint) {
  const testing::CallersStream callers;
  std::uint32_t gate = 0;
  FAKE(fake_kernel)(callers.get(), memory, 5, kSeveralBlocks, &gate);
  const Ready ready[] = {device.record(callers.number()), {}};
  std::vector<std::byte> found(10);
  std::atomic<bool> has_begun{false}, is_over{false};
  std::thread copying([&] {
    BlockingCopies copies(device, ready);
    has_begun = true;
    copies.to_host(found, memory);
    is_over = true;
  });
  while (!has_begun) std::this_thread::yield();
  EXPECT_FALSE(is_over);
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  copying.join();
  EXPECT_EQ(found, std::vector<std::byte>(10, std::byte{5}));
}

TEST_F(BlockingCopiesTest, SayWhatTheDriverRefuses) {
  BlockingCopies copies(device, {});
  for (const char* function : {"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"}) {
    FAKE(fake_refuse)(function, 999, 0);
    EXPECT_THROW(copies.within(memory, other, kSeveralBlocks), Error);
  }
  copies.to_device(memory, host);  // it works
  FAKE(fake_refuse)("cuMemHostAlloc", 999, 0);
  EXPECT_THROW(BlockingCopies(device, {}), Error);
}

// A copy that the GPU does not end may change the array at any time: so the operation counts it for ever.
TEST_F(BlockingCopiesTest, ACopyThatHangsIsCounted) {
  constexpr double kSoon_s = 0.02;
  worker::DeviceArrays arrays(device);
  FAKE(fake_hang)(1);
  {
    worker::CallersMemory callers(&arrays, kSoon_s);
    EXPECT_THROW(callers.write(memory, host), Error);
    FAKE(fake_hang)(0);
    EXPECT_EQ(arrays.copies, 0U);
  }
  EXPECT_EQ(arrays.copies, 1U);
  worker::CallersMemory(&arrays).write(memory, host);
  EXPECT_EQ(arrays.copies, 1U) << "this one has ended";
}

}  // namespace
}  // namespace bps::device
