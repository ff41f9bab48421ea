// SPDX-License-Identifier: Apache-2.0
#include "worker/host_contribution.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tensor/unrounded.h"
#include "worker/relaying_loop.h"

namespace bps::worker {
namespace {

constexpr std::uint64_t kElements = 8;
const std::uint64_t kMost = tensor::most_unrounded_bytes(Dtype::kFloat32, kElements);

// Of a host with a rank that changes what it has pushed: the sum is longer when it is made again.
struct GrowingSum final : tensor::ContributionSource {
  Status sum(std::uint32_t, Dtype, std::byte* into) override {
    tensor::UnroundedWriter writer(into, kElements);
    const std::vector<double> terms(6, 1.0);
    if (reads++ > 0) {
      for (std::uint32_t i = 0; i < kElements; ++i) writer.add(i, terms);
    }
    writer.finish();
    return Status::kOk;
  }
  void propose(std::uint32_t, const std::byte*) override {}
  void deliver(std::uint32_t, const std::byte*) override {}
  void fail(std::uint32_t, const Error&, std::span<const std::uint32_t>) override {}
  void fail_round(std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, const Error&) override {}
  void end_round(std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, const Error&) override {}
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
    tensor::Extent extent = one.extent_of(one.parts.front());
    EXPECT_EQ(extent.payload_bytes(), kMost) << "a slot is taken for this";
    ASSERT_EQ(one.fill(one.parts.front(), extent, buffer.data(), counters), Status::kOk);
    EXPECT_EQ(extent.payload_bytes(), length) << "what is sent";
  }
}

// What the ranks of a host say is not yet checked by a server.
class CompressedHostContribution : public RelayingLoop {
 protected:
  CompressedHostContribution() {
    const tensor::Partitioning cut(kBytes, 2, kBytes / 2);  // the sum of a partition has kBytes, as float32
    auto made = std::make_shared<Tensor>(cut, cut);
    made->group = std::make_shared<const van::Group>(van::Group{0, {0}});
    made->dtype = Dtype::kBfloat16;
    made->compressor = std::make_unique<Compressor>(compress::parse_compression("int8:everywhere=1,feedback=1"),
                                                    made->dtype, kBytes / 2, cut, cut.count());
    worker_loop->add_compressed(made);
    header.dtype = made->dtype;
    header.length = kBytes / 2;
    header.partition = 1;
  }
  bool is_compressed() {
    worker_loop->relay().contribute(0, header, 0, 0);
    worker_loop->step();
    worker_loop->step();
    tensor::PushHeader sent;
    std::memcpy(&sent, data.headers.back().data(), sizeof sent);
    return (sent.flags & tensor::kCompressed) != 0;
  }
};

TEST_F(CompressedHostContribution, IsOfThePartitionsOfTheTensor) {
  EXPECT_TRUE(is_compressed());
}

TEST_F(CompressedHostContribution, OfAnotherTypeTravelsAsItIs) {
  header.dtype = Dtype::kInt8;
  EXPECT_FALSE(is_compressed());
}

TEST_F(CompressedHostContribution, OfAnotherLengthTravelsAsItIs) {
  header.length = kBytes / 4;
  EXPECT_FALSE(is_compressed());
}

TEST_F(CompressedHostContribution, OfAPartitionThatThereIsNotTravelsAsItIs) {
  header.partition = 2;
  EXPECT_FALSE(is_compressed());
}

// See tensor/host_sum.h.
using HostContributionInTwoPhases = RelayingLoop;

TEST_F(HostContributionInTwoPhases, TheServerHearsOfTheAnswerForAHostWhenItsRanksHaveIt) {
  ServerConnection& server = *dynamic_cast<ServerConnection*>(control.sink);
  header.flags |= tensor::kTwoPhase;
  worker_loop->relay().contribute(0, header, 0, 0);
  worker_loop->step();
  worker_loop->step();
  ASSERT_EQ(data.posted, 1U);
  server.on_write(data, 0, 0);
  worker_loop->step();
  EXPECT_EQ(sum.events, std::vector<std::string>{"landed"});
  EXPECT_TRUE(control.sent<tensor::Landed>().empty());
  worker_loop->relay().note_landed(0);
  worker_loop->step();
  ASSERT_EQ(control.sent<tensor::Landed>().size(), 1U);
  EXPECT_EQ(control.sent<tensor::Landed>()[0].immediates, std::vector<std::uint32_t>{0});
  server.on_message(control, encode(tensor::Committed{{0}}, 1));
  EXPECT_EQ(sum.events, (std::vector<std::string>{"landed", "delivered"}));
}

TEST_F(HostContributionInTwoPhases, TheEndOfTheViewIsNoFailureOfWhatAHostHasContributed) {
  ServerConnection& server = *dynamic_cast<ServerConnection*>(control.sink);
  header.flags |= tensor::kTwoPhase;
  worker_loop->relay().contribute(0, header, 0, 0);
  worker_loop->step();
  worker_loop->step();
  worker_loop->relay().cancel(0, Error(ErrorCode::kTimeout, "a deadline has passed", ""));
  worker_loop->end_view(Error(ErrorCode::kRoundAborted, "the view has ended", ""));
  data.fenced = true;
  worker_loop->lose_server(server.node, "it has ended");
  EXPECT_EQ(sum.events, std::vector<std::string>{"the view has ended"});
}

}  // namespace
}  // namespace bps::worker
