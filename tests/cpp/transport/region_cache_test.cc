#include "transport/region_cache.h"

#include <gtest/gtest.h>

#include <vector>

#include "transport/self_transport.h"

namespace bps {
namespace {

class RegionCacheTest : public ::testing::Test {
 protected:
  std::span<std::byte> part(std::size_t begin, std::size_t size) { return std::span(memory).subspan(begin, size); }

  Counters counters;
  SelfTransport transport{counters};
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 20);
};

TEST_F(RegionCacheTest, OneRegistrationServesTheWholeAllocation) {
  RegionCache cache(transport, 8);
  const RegionPtr whole = cache.find(part(0, 100), memory);
  EXPECT_EQ(cache.find(part(500000, 4096), memory), whole);
  EXPECT_EQ(cache.find(part((1 << 20) - 1, 1), memory), whole);
  EXPECT_EQ(cache.misses(), 1U);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(whole->bytes().data()) % 4096, 0U);
  EXPECT_EQ(whole->bytes().size() % 4096, 0U);
}

TEST_F(RegionCacheTest, AnAllocationThatGrewIsRegisteredAnew) {
  RegionCache cache(transport, 8);
  const RegionPtr small = cache.find(part(0, 1000), part(0, 1000));
  const RegionPtr grown = cache.find(part(0, 500000), part(0, 500000));
  EXPECT_NE(small, grown);
  EXPECT_GE(grown->bytes().size(), 500000U);
  EXPECT_EQ(cache.find(part(400000, 8), part(0, 500000)), grown);
}

TEST_F(RegionCacheTest, StaysBoundedAndKeepsWhatIsHeld) {
  RegionCache cache(transport, 4);
  const RegionPtr held = cache.find(part(0, 64), part(0, 64));
  for (std::size_t i = 1; i < 50; ++i) cache.find(part(i * 8192, 64), part(i * 8192, 64));
  EXPECT_LE(cache.size(), 4U);
  EXPECT_EQ(cache.find(part(0, 64), part(0, 64)), held);  // somebody holds it, so it was never dropped
}

TEST_F(RegionCacheTest, LeastRecentlyUsedGoesFirst) {
  RegionCache cache(transport, 2);
  std::weak_ptr<Region> a = cache.find(part(0, 64), part(0, 64));
  std::weak_ptr<Region> b = cache.find(part(16384, 64), part(16384, 64));
  cache.find(part(0, 64), part(0, 64));
  cache.find(part(65536, 64), part(65536, 64));
  EXPECT_FALSE(a.expired());
  EXPECT_TRUE(b.expired());
}

TEST_F(RegionCacheTest, ForgetsFreedMemoryWhateverPartIsNamed) {
  RegionCache cache(transport, 8);
  std::weak_ptr<Region> region = cache.find(part(8192, 64), part(8192, 100000));
  cache.forget(part(90000, 1));
  EXPECT_TRUE(region.expired());
  EXPECT_EQ(cache.size(), 0U);
}

}  // namespace
}  // namespace bps
