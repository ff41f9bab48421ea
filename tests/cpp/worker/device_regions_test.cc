// SPDX-License-Identifier: Apache-2.0
// What is registered of a GPU's memory, by which arguments, and for how long.
#include "worker/device_regions.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "device/fake_device.h"
#include "transport/local/self_transport.h"

namespace bps::worker {
namespace {

using device::testing::only_device;

class RecordingTransport final : public transport::local::SelfTransport {
 public:
  using SelfTransport::SelfTransport;

  struct Call {
    std::span<std::byte> bytes;
    bool by_dma_buf;
    std::uint64_t file_size;
  };
  bool takes_foreign() const override { return true; }
  transport::RegionPtr register_foreign(const transport::ForeignMemory& memory) override {
    struct stat file{};
    EXPECT_TRUE(memory.dma_buf < 0 || ::fstat(memory.dma_buf, &file) == 0) << "the descriptor is open";
    calls.push_back({memory.bytes, memory.dma_buf >= 0, static_cast<std::uint64_t>(file.st_size)});
    if (refuses) throw Error(ErrorCode::kTransport, "cannot register", "");
    return std::make_shared<transport::Region>(memory.bytes);
  }
  std::vector<Call> calls;
  bool refuses = false;
};

class DeviceRegionsTest : public ::testing::Test {
 protected:
  static std::byte* allocate(std::size_t size) { return static_cast<std::byte*>(FAKE(fake_allocate)(size)); }
  transport::RegionPtr find(std::byte* at, std::size_t size) { return regions.find(only_device(), {at, size}); }

  Counters counters;
  RecordingTransport transport{counters};
  DeviceRegions regions{transport, "/nonexistent"};
  const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
};

TEST_F(DeviceRegionsTest, RegisterTheWholePagesOfTheAllocation) {
  std::byte* const block = allocate(3 * page + 100);
  const transport::RegionPtr region = find(block + page + 8, 64);
  ASSERT_NE(region, nullptr);
  ASSERT_EQ(transport.calls.size(), 1U);
  EXPECT_TRUE(transport.calls[0].by_dma_buf);
  EXPECT_EQ(transport.calls[0].bytes.data(), block);
  EXPECT_EQ(transport.calls[0].bytes.size(), 4 * page);
  EXPECT_EQ(transport.calls[0].file_size, 4 * page) << "the memory that the descriptor names is that of the allocation";
  EXPECT_EQ(regions.bytes(), 4 * page);
  FAKE(fake_free)(block);
}

TEST_F(DeviceRegionsTest, RegisterAnAllocationOnce) {
  std::byte* const one = allocate(page);
  std::byte* const other = allocate(2 * page);
  const transport::RegionPtr region = find(one, page);
  EXPECT_EQ(find(one + 8, 16), region);
  EXPECT_NE(find(other, 2 * page), region);
  EXPECT_EQ(find(one, page), region);
  EXPECT_EQ(transport.calls.size(), 2U);
  FAKE(fake_free)(one);
  FAKE(fake_free)(other);
}

TEST_F(DeviceRegionsTest, ForgetWhatWasFreed) {
  std::byte* const block = allocate(page);
  const std::weak_ptr<transport::Region> region = find(block, page);
  FAKE(fake_free)(block);
  EXPECT_FALSE(region.expired());
  regions.drop_freed();
  EXPECT_TRUE(region.expired());
  EXPECT_EQ(regions.bytes(), 0U);
}

// The kernel gives the lowest free addresses, so that the second allocation lies where the first one was.
TEST_F(DeviceRegionsTest, NeverTakeTheRegistrationOfAnEarlierAllocation) {
  std::byte* const block = allocate(page);
  const std::weak_ptr<transport::Region> before = find(block, page);
  FAKE(fake_free)(block);
  std::byte* const again = allocate(page);
  for (int i = 0; i < 2; ++i) EXPECT_NE(find(again, page), nullptr);
  if (again != block) GTEST_SKIP() << "the addresses are others";
  EXPECT_TRUE(before.expired());
  EXPECT_EQ(transport.calls.size(), 2U);
  FAKE(fake_free)(again);
}

TEST_F(DeviceRegionsTest, StageWhatCannotBeRegisteredAndAskOnce) {
  transport.refuses = true;
  std::byte* const block = allocate(page);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(find(block, page), nullptr);
  EXPECT_EQ(transport.calls.size(), 1U);
  FAKE(fake_free)(block);
}

TEST_F(DeviceRegionsTest, StageAnArrayBeyondItsAllocation) {
  std::byte* const block = allocate(page);
  EXPECT_EQ(find(block + 8, page), nullptr);
  EXPECT_TRUE(transport.calls.empty());
  FAKE(fake_free)(block);
}

// The second way is for kernels and drivers without dma-buf.
TEST_F(DeviceRegionsTest, UsePeerMemoryWhereThereIsNoDmaBuf) {
  std::string modules = ::testing::TempDir() + "modulesXXXXXX";
  ASSERT_NE(::mkdtemp(modules.data()), nullptr);
  DeviceRegions with_module(transport, modules);
  std::byte* const block = allocate(page);
  FAKE(fake_refuse)("cuMemGetHandleForAddressRange", 801, 0);
  EXPECT_EQ(with_module.find(only_device(), {block, page}), nullptr) << "the module is not there";
  EXPECT_TRUE(transport.calls.empty());
  std::filesystem::create_directory(modules + "/nvidia_peermem");
  std::byte* const next = allocate(page);
  FAKE(fake_refuse)("cuMemGetHandleForAddressRange", 801, 0);
  EXPECT_NE(with_module.find(only_device(), {next, page}), nullptr);
  ASSERT_EQ(transport.calls.size(), 1U);
  EXPECT_FALSE(transport.calls[0].by_dma_buf);
  EXPECT_EQ(transport.calls[0].bytes.data(), next);
  EXPECT_EQ(transport.calls[0].bytes.size(), page);
  FAKE(fake_free)(block);
  FAKE(fake_free)(next);
  std::filesystem::remove_all(modules);
}

}  // namespace
}  // namespace bps::worker
