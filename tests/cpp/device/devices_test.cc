// SPDX-License-Identifier: Apache-2.0
#include "device/devices.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "device/fake_device.h"

namespace bps::device::testing {
namespace {

TEST(ChooseGpu, TakesTheFirstThatSays) {
  EXPECT_EQ(choose_gpu({.wanted = 2, .current = 1, .count = 4, .local_rank = 3}), 2);
  EXPECT_EQ(choose_gpu({.current = 1, .count = 4, .local_rank = 3}), 1);
  EXPECT_EQ(choose_gpu({.count = 4, .local_rank = 3}), 3);
  EXPECT_EQ(choose_gpu({.count = 1, .local_rank = 3}), 0) << "CUDA_VISIBLE_DEVICES shows one";
}

TEST(ChooseGpu, GuessesNone) {
  EXPECT_EQ(choose_gpu({.count = 4}), std::nullopt);
  EXPECT_EQ(choose_gpu({.count = 4, .local_rank = 4}), std::nullopt) << "ranks share GPUs, nobody knows how";
  EXPECT_EQ(choose_gpu({.count = 0, .local_rank = 0}), std::nullopt);
  EXPECT_THROW((void)choose_gpu({.wanted = 4, .count = 4}), Error);
}

TEST(AddressOfGpu, IsWrittenAsTheKernelWritesIt) {
  EXPECT_EQ(address_of_gpu(BPS_FAKE_CUDA, std::nullopt, std::nullopt), "0000:1a:00.0");
  const Device::Current current(only_device());
  EXPECT_EQ(address_of_gpu(BPS_FAKE_CUDA, std::nullopt, 3), "0000:1a:00.0");
  EXPECT_THROW((void)address_of_gpu("libno-such-driver.so", 0, std::nullopt), Error);
}

}  // namespace
}  // namespace bps::device::testing
