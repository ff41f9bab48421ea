// SPDX-License-Identifier: Apache-2.0
// Copies from and to a device, on the fake driver (fake_cuda.h): what is ordered, what is seen, and how it fails.
#include "device/copy_stream.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/fd.h"
#include "device/fake_device.h"

namespace bps::device {
namespace {

constexpr std::size_t kBytes = 64 << 10;
constexpr double kPatience_s = 60;

class CopyStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    FAKE(fake_delay)(200);
    memory = static_cast<std::byte*>(FAKE(fake_allocate)(kBytes));
    device.pin(host);
  }
  void TearDown() override {
    device.unpin(host);
    FAKE(fake_free)(memory);
    FAKE(fake_end_default_stream)();  // with its thread, beside which no later test may fork under the thread checker
  }
  std::vector<std::byte> on_device(std::size_t first) const {
    std::vector<std::byte> found(first);
    FAKE(fake_read)(memory, found.data(), first);
    return found;
  }
  static bool all(const std::vector<std::byte>& bytes, int value) {
    return std::ranges::all_of(bytes, [&](std::byte one) { return one == static_cast<std::byte>(value); });
  }
  static void await(const CopyStream& stream, std::uint32_t mark) {
    for (const Deadline until = Deadline::after(kPatience_s); !stream.reached(mark);) ASSERT_FALSE(until.passed());
  }

  Device& device = testing::only_device();
  std::vector<std::byte> host = std::vector<std::byte>(kBytes);
  std::byte* memory = nullptr;
  const Fd doorbell{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
};

TEST_F(CopyStreamTest, KnowsWhoseMemoryAPointerIs) {
  EXPECT_EQ(Device::owner_of(device.driver(), memory), std::optional(0));
  EXPECT_EQ(Device::owner_of(device.driver(), memory + kBytes - 1), std::optional(0));
  EXPECT_EQ(Device::owner_of(device.driver(), &doorbell), std::nullopt);
}

TEST_F(CopyStreamTest, ACopyWaitsForTheCallersStream) {
  const testing::CallersStream callers;
  std::uint32_t gate = 0;
  FAKE(fake_kernel)(callers.get(), memory, 7, kBytes, &gate);
  const Ready ready = device.record(callers.number());
  const Device::Current current(device);
  CopyStream down(device, doorbell.get());
  ASSERT_EQ(down.wait_for(ready), cuda::kSuccess);
  ASSERT_EQ(down.to_host(host.data(), memory, kBytes), cuda::kSuccess);
  ASSERT_EQ(down.mark(), cuda::kSuccess);
  EXPECT_FALSE(down.drain(Deadline::after(0.05))) << "the kernel has not ended";
  EXPECT_FALSE(down.reached(1));
  EXPECT_TRUE(all(host, 0));
  __atomic_store_n(&gate, 1, __ATOMIC_RELEASE);
  await(down, 1);
  EXPECT_TRUE(all(host, 7));
}

TEST_F(CopyStreamTest, AMarkIsReachedWhenAllBeforeItHasEnded) {
  const Device::Current current(device);
  CopyStream up(device, doorbell.get());
  constexpr std::size_t kPieces = 16;
  constexpr std::size_t kPiece = kBytes / kPieces;
  std::ranges::fill(host, std::byte{9});
  for (std::size_t i = 0; i < kPieces; ++i) {
    ASSERT_EQ(up.to_device(memory + i * kPiece, host.data() + i * kPiece, kPiece), cuda::kSuccess);
    ASSERT_EQ(up.mark(), cuda::kSuccess);
  }
  for (std::uint32_t mark = 1; mark <= kPieces; ++mark) {
    await(up, mark);
    EXPECT_TRUE(all(on_device(mark * kPiece), 9)) << "what is behind it may still be on its way";
  }
  EXPECT_EQ(up.marks(), kPieces);
}

TEST_F(CopyStreamTest, WakesASleepingLoopOncePerMark) {
  const Device::Current current(device);
  CopyStream down(device, doorbell.get());
  ASSERT_EQ(down.ring_at_last_mark(), cuda::kSuccess);
  ASSERT_TRUE(down.drain(Deadline::after(kPatience_s)));
  pollfd bell{doorbell.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&bell, 1, 0), 0) << "nothing is awaited";
  ASSERT_EQ(down.to_host(host.data(), memory, kBytes), cuda::kSuccess);
  ASSERT_EQ(down.mark(), cuda::kSuccess);
  ASSERT_EQ(down.ring_at_last_mark(), cuda::kSuccess);
  ASSERT_EQ(down.ring_at_last_mark(), cuda::kSuccess);
  ASSERT_EQ(::poll(&bell, 1, static_cast<int>(kPatience_s * 1e3)), 1);
  EXPECT_TRUE(down.reached(1)) << "it rings behind the mark";
  ASSERT_TRUE(down.drain(Deadline::after(kPatience_s)));
  std::uint64_t rings = 0;
  ASSERT_EQ(::read(doorbell.get(), &rings, sizeof rings), static_cast<ssize_t>(sizeof rings));
  EXPECT_EQ(rings, 1U);
}

TEST_F(CopyStreamTest, EventsAreUsedAgain) {
  const testing::CallersStream callers;
  const auto record = [&] { return device.record(callers.number()); };
  {
    const Ready first = record(), second = first, third = record();
  }
  const int made = FAKE(fake_events)();
  for (int i = 0; i < 100; ++i) {
    Ready one = record();
    Ready two = record();
    one = two;
  }
  EXPECT_EQ(FAKE(fake_events)(), made);
}

TEST_F(CopyStreamTest, RefusesAStreamThatIsBeingCaptured) {
  const testing::CallersStream callers;
  FAKE(fake_begin_capture)(callers.get());
  try {
    (void)device.record(callers.number());
    FAIL() << "it was recorded";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("CUDA graph"), std::string::npos);
  }
}

TEST_F(CopyStreamTest, LeavesNothingBehind) {
  const int streams = FAKE(fake_streams)();
  const int pinned = FAKE(fake_pinned)();
  {
    const Device::Current current(device);
    CopyStream up(device, doorbell.get());
    ASSERT_EQ(up.to_device(memory, host.data(), kBytes), cuda::kSuccess);
    ASSERT_EQ(up.mark(), cuda::kSuccess);
    EXPECT_EQ(FAKE(fake_streams)(), streams + 1);
  }
  EXPECT_EQ(FAKE(fake_streams)(), streams);
  EXPECT_EQ(FAKE(fake_pinned)(), pinned);
}

TEST_F(CopyStreamTest, AMarkThatTheDriverRefusesIsReachedBehindWhatItTook) {
  const Device::Current current(device);
  CopyStream down(device, doorbell.get());
  FAKE(fake_hang)(1);
  ASSERT_EQ(down.to_host(host.data(), memory, kBytes), cuda::kSuccess);
  FAKE(fake_refuse)("cuStreamWriteValue32_v2", 900, 0);
  EXPECT_EQ(down.mark(), 900);
  EXPECT_EQ(down.settle(), cuda::kNotReady);
  EXPECT_FALSE(down.reached(1)) << "the copy is under way";
  FAKE(fake_refuse)("cuStreamQuery", 900, 0);
  EXPECT_EQ(down.settle(), cuda::kNotReady) << "a refusal to look says nothing of the device";
  FAKE(fake_hang)(0);
  ASSERT_TRUE(down.drain(Deadline::after(kPatience_s)));
  EXPECT_FALSE(down.reached(1)) << "no flag says so";
  EXPECT_EQ(down.settle(), cuda::kSuccess);
  EXPECT_TRUE(down.reached(1));
  ASSERT_EQ(down.mark(), cuda::kSuccess);
  await(down, 2);
}

// In a process of its own: that capture never ends.
TEST_F(CopyStreamTest, CapturesOfOtherThreadsForbidNothing) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        FAKE(fake_capture_elsewhere)();
        const testing::CallersStream callers;
        const Ready ready = device.record(callers.number());
        const Device::Current current(device);
        CopyStream down(device, doorbell.get());
        const bool taken = down.wait_for(ready) == cuda::kSuccess &&
                           down.to_host(host.data(), memory, kBytes) == cuda::kSuccess && down.mark() == cuda::kSuccess;
        std::_Exit(taken && down.drain(Deadline::after(kPatience_s)) && down.reached(1) ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(CopyStreamTest, RefusalsForCapturesSayWhatToDo) {
  FAKE(fake_refuse)("cuEventRecord", 906, 0);
  try {
    (void)device.record(1);
    FAIL() << "it was recorded";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(error.hint().find("captured into a CUDA graph"), std::string::npos);
  }
}

// In a process of its own: a device that has failed stays so.
TEST_F(CopyStreamTest, TellsOfADeviceThatHasFailed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        const Device::Current current(device);
        CopyStream up(device, doorbell.get());
        FAKE(fake_break)();
        const bool refuses = up.to_device(memory, host.data(), kBytes) == 700 && up.state() == 700;
        const bool ends = up.drain(Deadline::after(kPatience_s));
        std::fprintf(stderr, "%s", device.driver().describe(up.state()).c_str());
        std::_Exit(refuses && ends ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "an illegal memory access was encountered \\(CUDA error 700\\)");
}

TEST(Driver, ThatIsNotThereSaysWhatToInstall) {
  try {
    (void)Driver::open("libno-such-driver.so.1");
    FAIL() << "it was opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTransport);
    EXPECT_NE(std::string(error.what()).find("libno-such-driver.so.1"), std::string::npos) << error.what();
    EXPECT_NE(error.hint().find("515"), std::string::npos);
  }
}

TEST(Driver, ThatLacksAFunctionIsTooOld) {
  try {
    (void)Driver::open("libc.so.6");
    FAIL() << "it was opened";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("libc.so.6 is too old: it has no cuInit"), std::string::npos);
  }
}

}  // namespace
}  // namespace bps::device
