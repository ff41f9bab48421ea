// SPDX-License-Identifier: Apache-2.0
#include "tensor/partition.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace bps::tensor {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// The pieces are the tensor, in order, without gaps, each within one shard and within the limit.
void expect_exact_cover(std::uint64_t bytes, std::uint32_t element, std::uint64_t limit, std::uint32_t shards) {
  SCOPED_TRACE(::testing::Message() << bytes << " bytes of " << element << ", limit " << limit << ", " << shards);
  const Partitioning cut(bytes, element, limit, shards);
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < cut.count(); ++i) {
    const auto piece = cut.piece(i);
    ASSERT_EQ(piece.offset, next);
    ASSERT_GT(piece.length, 0U);
    ASSERT_LE(piece.length, std::max<std::uint64_t>(limit, element));
    ASSERT_EQ(piece.offset % element, 0U);
    ASSERT_LT(piece.shard, shards);
    ASSERT_GE(piece.offset, cut.shard_offset(piece.shard));
    ASSERT_LE(piece.offset + piece.length, cut.shard_offset(piece.shard) + cut.shard_length(piece.shard));
    next += piece.length;
  }
  ASSERT_EQ(next, bytes);
  std::uint64_t shard_next = 0;
  for (std::uint32_t s = 0; s < shards; ++s) {
    ASSERT_EQ(cut.shard_offset(s), shard_next);
    shard_next += cut.shard_length(s);
  }
  ASSERT_EQ(shard_next, bytes);
}

TEST(Partitioning, CoversEveryTensorExactly) {
  for (const std::uint32_t element : {1U, 2U, 4U, 8U}) {
    for (const std::uint64_t count : {0, 1, 2, 3, 7, 99, 100, 101, 4095, 4096, 4097}) {
      for (const std::uint64_t limit : {1, 3, 8, 100, 4096, 100'000}) {
        for (const std::uint32_t shards : {1U, 2U, 3U, 8U, 200U}) {
          expect_exact_cover(count * element, element, limit, shards);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Partitioning, CutsAtTheLimit) {
  EXPECT_EQ(Partitioning(4 * kMiB - 4, 4, 4 * kMiB).count(), 1U);
  EXPECT_EQ(Partitioning(4 * kMiB, 4, 4 * kMiB).count(), 1U);
  EXPECT_EQ(Partitioning(4 * kMiB + 4, 4, 4 * kMiB).count(), 2U);
  EXPECT_EQ(Partitioning(4 * kMiB + 4, 4, 4 * kMiB).piece(1).length, 4U);
}

TEST(PartitionForLink, IsWhatTheLinkCarriesInAFifthOfAMillisecond) {
  EXPECT_EQ(partition_for_link(0), 16U << 10);
  EXPECT_EQ(partition_for_link(300e6 / 8), 16U << 10);
  EXPECT_EQ(partition_for_link(1e9 / 8), 32U << 10);
  EXPECT_EQ(partition_for_link(2.5e9 / 8), 64U << 10);
  EXPECT_EQ(partition_for_link(10e9 / 8), 192U << 10);
  EXPECT_EQ(partition_for_link(25e9 / 8), 512U << 10);
  EXPECT_EQ(partition_for_link(400e9 / 8), 512U << 10);
  EXPECT_EQ(partition_for_link(1e300), 512U << 10);
}

TEST(Partitioning, RoundsTheLimitDownToElements) {
  EXPECT_EQ(Partitioning(800, 8, 23).piece(0).length, 16U);
}

TEST(Partitioning, TheSameElementsInTheSamePiecesWhenTheyAreLarger) {
  const Partitioning halves(2 * 1001, 2, 300);
  const Partitioning floats = halves.with_elements_of(2, 4);
  ASSERT_EQ(floats.count(), halves.count());
  for (std::uint64_t i = 0; i < halves.count(); ++i) {
    EXPECT_EQ(floats.piece(i).offset, 2 * halves.piece(i).offset);
    EXPECT_EQ(floats.piece(i).length, 2 * halves.piece(i).length);
  }
}

TEST(CutRule, APartitionOfHalvesHasAsManyElementsAsOneOfFloats) {
  const CutRule rule{.partition_bytes = 1000, .min_partition_bytes = 1000};
  EXPECT_EQ(rule.for_float32(2).cut(10'000, 2).piece(0).length, 500U);
  EXPECT_EQ(rule.for_float32(4).cut(10'000, 4).piece(0).length, 1000U);
  const CutRule tiny{.partition_bytes = 1, .min_partition_bytes = 1};
  EXPECT_EQ(tiny.for_float32(2).cut(10, 2).piece(0).length, 2U);
}

TEST(Partitioning, ShardsAsTorchChunk) {
  const Partitioning cut(10 * 4, 4, 1024, 4);  // torch.chunk(10 elements, 4): 3, 3, 3, 1
  EXPECT_EQ(cut.count(), 4U);
  EXPECT_EQ(cut.shard_length(0), 12U);
  EXPECT_EQ(cut.shard_length(3), 4U);
  EXPECT_EQ(Partitioning(5 * 4, 4, 1024, 4).shard_length(3), 0U);  // 2, 2, 1, nothing
}

TEST(Partitioning, HasNoLimitAt32Bits) {
  const std::uint64_t bytes = (std::uint64_t{1} << 40) + 4;
  const Partitioning cut(bytes, 4, 4 * kMiB);
  EXPECT_EQ(cut.count(), (std::uint64_t{1} << 18) + 1);  // more than BytePS's 65,536, too
  EXPECT_EQ(cut.piece(cut.count() - 1).offset, bytes - 4);
}

TEST(PartitionSize, IsTheLimitForLargeTensors) {
  EXPECT_EQ(partition_size(64 * kMiB, 4 * kMiB, 4, kMiB / 4), 4 * kMiB);
  EXPECT_EQ(partition_size(~std::uint64_t{0}, 4 * kMiB, 4, kMiB / 4), 4 * kMiB);
}

TEST(PartitionSize, GivesEachServerFourPiecesOfMiddleSizedTensors) {
  EXPECT_EQ(partition_size(16 * kMiB, 4 * kMiB, 2, kMiB / 4), 2 * kMiB);
  EXPECT_EQ(partition_size(16 * kMiB + 4, 4 * kMiB, 2, kMiB / 4), 2 * kMiB + (64U << 10));
}

TEST(PartitionSize, StaysWithinItsBounds) {
  EXPECT_EQ(partition_size(kMiB, 4 * kMiB, 8, kMiB / 4), kMiB / 4);
  EXPECT_EQ(partition_size(0, 4 * kMiB, 8, kMiB / 4), kMiB / 4);
  EXPECT_EQ(partition_size(1000, 1000, 8, kMiB / 4), 1000U);  // the limit wins over the floor
  EXPECT_EQ(partition_size(16 * kMiB - 4, 4 * kMiB, 1, kMiB / 4), 4 * kMiB);
}

}  // namespace
}  // namespace bps::tensor
