// SPDX-License-Identifier: Apache-2.0
#include "transport/region_cache.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <memory>
#include <string>
#include <vector>

#include "transport/local/self_transport.h"
#include "transport/shm/shared_memory.h"
#include "watched_memory.h"

namespace bps::transport {
namespace {

class RegionCacheTest : public ::testing::Test {
 protected:
  Allocation block(std::uint64_t identity, std::size_t begin = 0, std::size_t size = 64) {
    return {std::span(memory).subspan(begin, size), identity};
  }

  Counters counters;
  local::SelfTransport transport{counters};
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 20);
};

TEST_F(RegionCacheTest, ABlockIsRegisteredOnceAndExactly) {
  RegionCache cache(transport, 8);
  const RegionPtr region = cache.find(block(1, 100, 500000));
  EXPECT_EQ(cache.find(block(1, 100, 500000)), region);
  EXPECT_EQ(region->bytes().data(), memory.data() + 100);
  EXPECT_EQ(region->bytes().size(), 500000U);
}

// The addresses of what was freed: what is registered there is other pages.
TEST_F(RegionCacheTest, AnotherBlockAtTheSameAddressIsRegisteredAnew) {
  RegionCache cache(transport, 8);
  const RegionPtr first = cache.find(block(1));
  const RegionPtr second = cache.find(block(2));
  EXPECT_NE(first, second);
}

TEST_F(RegionCacheTest, StaysBoundedAndKeepsWhatIsHeld) {
  RegionCache cache(transport, 4);
  const RegionPtr held = cache.find(block(100));
  for (std::uint64_t i = 1; i < 50; ++i) cache.find(block(i));
  EXPECT_EQ(cache.bytes(), 4 * held->bytes().size());
  EXPECT_EQ(cache.find(block(100)), held);
}

TEST_F(RegionCacheTest, MayExceedItsLimitByWhatIsHeld) {
  RegionCache cache(transport, 2);
  std::vector<RegionPtr> held;
  for (std::uint64_t i = 0; i < 5; ++i) held.push_back(cache.find(block(i)));
  for (std::uint64_t i = 0; i < 5; ++i) EXPECT_EQ(cache.find(block(i)), held[i]);
}

TEST_F(RegionCacheTest, WhatWasNotUsedForLongestGoesFirst) {
  RegionCache cache(transport, 2);
  std::weak_ptr<Region> a = cache.find(block(1));
  std::weak_ptr<Region> b = cache.find(block(2));
  cache.find(block(1));
  cache.find(block(3));
  EXPECT_FALSE(a.expired());
  EXPECT_TRUE(b.expired());
}

TEST_F(RegionCacheTest, ForgetsWhatIsGoneButNotUnderItsUsers) {
  RegionCache cache(transport, 8);
  std::weak_ptr<Region> unused = cache.find(block(1));
  const RegionPtr used = cache.find(block(2));
  for (const std::uint64_t identity : {1, 2, 3}) cache.forget(identity);
  EXPECT_TRUE(unused.expired());
  EXPECT_EQ(used.use_count(), 1);
  EXPECT_EQ(cache.bytes(), 0U);
}

// As a NIC is: it keeps the pages of what it has registered.
class Device final : public local::SelfTransport {
 public:
  Device(Counters& counters, CallersMemory rule) : SelfTransport(counters), rule_(rule) {}
  CallersMemory callers_memory() const override { return rule_; }

 private:
  const CallersMemory rule_;
};

class DeviceMemoryTest : public RegionCacheTest {
 protected:
  static constexpr std::size_t kSize = 1 << 16;
  void SetUp() override {
    if (const std::string why = why_memory_is_not_watched(); !why.empty()) GTEST_SKIP() << why;
    map();
  }
  void TearDown() override { ::munmap(address, kSize); }
  void map() {
    void* got = ::mmap(address, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_TRUE(got == address || address == nullptr);
    address = got;
    plain = {{static_cast<std::byte*>(address), kSize}, 7};
  }

  void* address = nullptr;
  Allocation plain;
  Device device{counters, CallersMemory::kWatched};
  RegionCache cache{device, 8};
};

TEST_F(DeviceMemoryTest, RegistersAnewWhatWasUnmappedAndMapped) {
  const RegionPtr first = cache.find(plain);
  ASSERT_TRUE(first);
  EXPECT_EQ(cache.find(plain), first);
  EXPECT_EQ(cache.drop_changed(), 0U);
  ::munmap(address, kSize);
  map();
  EXPECT_FALSE(first->is_current());
  EXPECT_EQ(cache.drop_changed(), 1U);
  const RegionPtr second = cache.find(plain);
  EXPECT_NE(first, second);
  ASSERT_TRUE(second);
  EXPECT_TRUE(second->is_current());
  EXPECT_EQ(cache.drop_changed(), 0U);
  EXPECT_EQ(cache.find(plain), second);
  EXPECT_EQ(cache.bytes(), kSize);
}

// As long as a device has them, nobody else gets these pages.
TEST_F(DeviceMemoryTest, DropsWhatWasUnmappedAndIsNotUsedAgain) {
  const std::weak_ptr<Region> first = cache.find(plain);
  EXPECT_FALSE(first.expired());
  ::munmap(address, kSize);
  EXPECT_EQ(cache.drop_changed(), 1U);
  EXPECT_TRUE(first.expired());
  map();
}

// Somebody may be about to discard the pages that are there now.
TEST_F(DeviceMemoryTest, StagesWhatWasDiscarded) {
  ASSERT_TRUE(cache.find(plain));
  ::madvise(address, kSize, MADV_DONTNEED);
  EXPECT_EQ(cache.drop_changed(), 1U);
  EXPECT_FALSE(cache.find(plain));
  EXPECT_EQ(cache.drop_changed(), 0U);
  EXPECT_FALSE(cache.find(plain));
  EXPECT_EQ(cache.bytes(), 0U);
  EXPECT_TRUE(cache.find({plain.bytes, 8})) << "another block";
}

TEST_F(DeviceMemoryTest, UsesOurMemoryDirectlyAndStagesWhatCannotBeWatched) {
  const auto ours = shm::SharedMemory::create(kSize);
  EXPECT_TRUE(cache.find({ours->bytes(), 1}));
  void* shared = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT_FALSE(cache.find({{static_cast<std::byte*>(shared), kSize}, 2}));
  ::munmap(shared, kSize);
  Device staging{counters, CallersMemory::kStaged};
  RegionCache staged{staging, 8};
  EXPECT_FALSE(staged.find(plain));
  EXPECT_TRUE(staged.find({ours->bytes(), 1}));
}

}  // namespace
}  // namespace bps::transport
