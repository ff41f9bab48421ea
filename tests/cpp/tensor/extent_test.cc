// SPDX-License-Identifier: Apache-2.0
// What each kind of operation sends and wants, against a walk over all bytes of a small tensor.
#include "tensor/extent.h"

#include <gtest/gtest.h>

#include <vector>

namespace bps::tensor {
namespace {

constexpr std::uint64_t kBytes = 10 * 4;  // ten elements, of which three members have 4, 4 and 2
constexpr std::uint32_t kMembers = 3;

Partitioning cut_for(OperationKind kind) {
  return Partitioning(kBytes, 4, 12, is_sharded(kind) ? kMembers : 1);
}

// Which bytes of the whole tensor the member contributes and wants, with the offsets that extent_of() gives.
struct Walk {
  std::vector<std::int64_t> sent = std::vector<std::int64_t>(kBytes, -1);    // offset in the member's input
  std::vector<std::int64_t> wanted = std::vector<std::int64_t>(kBytes, -1);  // offset in the member's output

  Walk(const MemberCall& request, const Partitioning& cut) {
    for (std::uint64_t i = 0; i < cut.count(); ++i) {
      const Extent extent = extent_of(request, cut, i);
      EXPECT_EQ(extent.length, cut.piece(i).length);
      for (std::uint64_t byte = 0; byte < extent.length; ++byte) {
        const std::uint64_t at = cut.piece(i).offset + byte;
        if (extent.has_payload()) sent[at] = static_cast<std::int64_t>(extent.input_offset + byte);
        if (extent.wants_data()) wanted[at] = static_cast<std::int64_t>(extent.output_offset + byte);
      }
    }
  }
};

std::vector<std::int64_t> range(std::uint64_t begin, std::uint64_t end, std::int64_t first) {
  std::vector<std::int64_t> offsets(kBytes, -1);
  for (std::uint64_t at = begin; at < end; ++at) offsets[at] = first + static_cast<std::int64_t>(at - begin);
  return offsets;
}
const std::vector<std::int64_t> kNothing(kBytes, -1);

TEST(Extent, PushPullSendsAndWantsEverything) {
  const Walk walk({OperationKind::kPushPull, true, 1, 0}, cut_for(OperationKind::kPushPull));
  EXPECT_EQ(walk.sent, range(0, kBytes, 0));
  EXPECT_EQ(walk.wanted, range(0, kBytes, 0));
}

TEST(Extent, ReduceScatterSendsEverythingAndWantsItsShardFromZero) {
  const std::uint64_t begins[] = {0, 16, 32, 40};
  for (std::uint32_t member = 0; member < kMembers; ++member) {
    const Walk walk({OperationKind::kReduceScatter, true, member, 0}, cut_for(OperationKind::kReduceScatter));
    EXPECT_EQ(walk.sent, range(0, kBytes, 0));
    EXPECT_EQ(walk.wanted, range(begins[member], begins[member + 1], 0)) << member;
  }
}

TEST(Extent, AllGatherSendsItsShardFromZeroAndWantsTheOthers) {
  const std::uint64_t begins[] = {0, 16, 32, 40};
  for (std::uint32_t member = 0; member < kMembers; ++member) {
    const Walk walk({OperationKind::kAllGather, true, member, 0}, cut_for(OperationKind::kAllGather));
    EXPECT_EQ(walk.sent, range(begins[member], begins[member + 1], 0)) << member;
    std::vector<std::int64_t> others = range(0, kBytes, 0);
    for (std::uint64_t at = begins[member]; at < begins[member + 1]; ++at) others[at] = -1;
    EXPECT_EQ(walk.wanted, others) << member;
  }
}

TEST(Extent, BroadcastSendsFromItsRootOnly) {
  const Partitioning cut = cut_for(OperationKind::kBroadcast);
  const Walk root({OperationKind::kBroadcast, true, 2, 2}, cut);
  EXPECT_EQ(root.sent, range(0, kBytes, 0));
  EXPECT_EQ(root.wanted, kNothing);
  const Walk other({OperationKind::kBroadcast, true, 0, 2}, cut);
  EXPECT_EQ(other.sent, kNothing);
  EXPECT_EQ(other.wanted, range(0, kBytes, 0));
}

TEST(Extent, PushAndPullApart) {
  const Partitioning cut = cut_for(OperationKind::kSplit);
  const Walk push({OperationKind::kSplit, true, 0, 0}, cut);
  EXPECT_EQ(push.sent, range(0, kBytes, 0));
  EXPECT_EQ(push.wanted, kNothing);
  const Walk pull({OperationKind::kSplit, false, 0, 0}, cut);
  EXPECT_EQ(pull.sent, kNothing);
  EXPECT_EQ(pull.wanted, range(0, kBytes, 0));
}

TEST(Extent, EveryMemberPushesAndPullsEachPartition) {
  for (const auto kind : {OperationKind::kPushPull, OperationKind::kReduceScatter, OperationKind::kAllGather,
                          OperationKind::kBroadcast}) {
    for (std::uint32_t member = 0; member < kMembers; ++member) {
      const Partitioning cut = cut_for(kind);
      for (std::uint64_t i = 0; i < cut.count(); ++i) {
        const std::uint8_t flags = extent_of({kind, true, member, 1}, cut, i).flags;
        EXPECT_EQ(flags & (kIsPush | kIsPull), kIsPush | kIsPull);
      }
    }
  }
}

}  // namespace
}  // namespace bps::tensor
