// SPDX-License-Identifier: Apache-2.0
#include "worker/host_contribution.h"

#include <gtest/gtest.h>

#include <vector>

#include "tensor/unrounded.h"

namespace bps::worker {
namespace {

constexpr std::uint64_t kElements = 8;
const std::uint64_t kMost = tensor::most_unrounded_bytes(Dtype::kFloat32, kElements);

// Of a host with a rank that changes what it has pushed: the sum is longer when it is made again.
struct GrowingSum final : tensor::ContributionSource {
  Status read(std::uint32_t, std::byte* into) override {
    tensor::UnroundedWriter writer(into, kElements);
    const std::vector<double> terms(6, 1.0);
    if (reads++ > 0) {
      for (std::uint32_t i = 0; i < kElements; ++i) writer.add(i, terms);
    }
    writer.finish();
    return Status::kOk;
  }
  void land(std::uint32_t, const std::byte*) override {}
  void deliver(std::uint32_t, const std::byte*) override {}
  void fail(std::uint32_t, const Error&, std::span<const std::uint32_t>) override {}
  void fail_round(std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, const Error&) override {}
  int reads = 0;
};

TEST(HostContribution, ASlotForASumThatIsMadeAgainHoldsAnySum) {
  GrowingSum sum;
  HostContributions all;
  all.set_source(&sum);
  tensor::PushHeader header{};
  header.dtype = Dtype::kFloat32;
  header.op = ReduceOp::kExactSum;
  header.flags = tensor::kHasPayload | tensor::kIsPush | tensor::kIsPull | tensor::kUnrounded;
  header.length = kElements * sizeof(float);
  // No server is asked for anything here.
  alignas(std::max_align_t) static std::byte server[1];
  HostContribution& one = all.make(0, header, 0, *reinterpret_cast<ServerConnection*>(server));
  Counters counters;
  std::vector<std::byte> buffer(kMost);
  for (const std::uint64_t length : {tensor::kUnroundedHeader + kElements * sizeof(double), kMost}) {
    tensor::Placement placement = one.place(one.parts.front());
    EXPECT_EQ(placement.payload_bytes(), kMost) << "a slot is taken for this";
    ASSERT_EQ(one.fill(one.parts.front(), placement, buffer.data(), counters), Status::kOk);
    EXPECT_EQ(placement.payload_bytes(), length) << "what is sent";
  }
}

}  // namespace
}  // namespace bps::worker
