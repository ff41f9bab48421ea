// SPDX-License-Identifier: Apache-2.0
#include "tensor/push_header.h"

#include <gtest/gtest.h>

namespace bps::tensor {
namespace {

PushHeader valid() {
  PushHeader header{};
  header.version = transport::kProtocolVersion;
  header.dtype = Dtype::kInt32;
  header.op = ReduceOp::kAverage;
  header.flags = kHasPayload | kIsPush | kIsPull | kWantsData;
  header.length = 4000;
  return header;
}

TEST(PushHeader, GoldenBytes) {
  PushHeader header = valid();
  header.kind = OperationKind::kBroadcast;
  header.position = 0x0203;
  header.group = 0x04050607;
  header.tensor = 0x08090a0b;
  header.partition = 0x0c0d0e0f;
  header.round = 0x10111213;
  header.immediate = 0x14151617;
  header.epoch = 0x21222324;
  header.length = 0x18;
  header.root = 0x1b;
  header.answer_key = 0x19;
  header.answer_address = 0x1a;
  constexpr std::uint8_t kGolden[64] = {21,   0,    4,    1,    15,   3,    3,    2,    7,    6,    5,    4,    0x0b,
                                        0x0a, 9,    8,    0x0f, 0x0e, 0x0d, 0x0c, 0x13, 0x12, 0x11, 0x10, 0x17, 0x16,
                                        0x15, 0x14, 0x24, 0x23, 0x22, 0x21, 0x18, 0,    0,    0,    0x1b, 0,    0,
                                        0,    0x19, 0,    0,    0,    0,    0,    0,    0,    0x1a, 0,    0,    0,
                                        0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0};
  EXPECT_TRUE(std::ranges::equal(bytes_of(header), std::as_bytes(std::span(kGolden))));
  EXPECT_TRUE(std::ranges::equal(codec::encode(header), std::as_bytes(std::span(kGolden))));
  EXPECT_TRUE(codec::decode<PushHeader>(bytes_of(header)));
}

TEST(PushHeader, WhatNoSenderMayWriteIsRefused) {
  const auto refused = [](auto change) {
    PushHeader header = valid();
    change(header);
    return !codec::accepts(header);
  };
  EXPECT_FALSE(refused([](PushHeader&) {}));
  EXPECT_TRUE(refused([](PushHeader& h) { h.version = 1; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.dtype = Dtype{77}; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.op = ReduceOp{9}; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.kind = OperationKind{7}; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags = 0; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags = kHasPayload | kIsPull; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags |= kUnrounded; })) << "its sum is not exact";
  EXPECT_TRUE(refused([](PushHeader& h) { h.op = ReduceOp::kExactSum; })) << "it is an integer";
  const auto exact = [](PushHeader& h) {
    h.op = ReduceOp::kExactAverage;
    h.dtype = Dtype::kFloat32;
    h.flags |= kUnrounded;
  };
  EXPECT_FALSE(refused(exact));
  for (const std::uint8_t never : {kForHost, kCompressed}) {
    EXPECT_TRUE(refused([&](PushHeader& h) { exact(h), h.flags |= never; }));
  }
  EXPECT_TRUE(refused([&](PushHeader& h) { exact(h), h.flags &= ~kHasPayload; }));
  EXPECT_TRUE(refused([&](PushHeader& h) { exact(h), h.op = ReduceOp::kExactSumToOdd; })) << "it is not float64";
  const auto accumulates = [](PushHeader& h) {
    h.kind = OperationKind::kAccumulate;
    h.op = ReduceOp::kSum;
    h.group = kAlone | 3;
    h.place = 7;
  };
  EXPECT_FALSE(refused(accumulates));
  EXPECT_FALSE(refused([&](PushHeader& h) { accumulates(h), h.priority = 5; })) << "the group that has stored it";
  const auto stores = [](PushHeader& h) {
    h.kind = OperationKind::kStore;
    h.op = ReduceOp::kSum;
  };
  EXPECT_FALSE(refused(stores));
  EXPECT_TRUE(refused([&](PushHeader& h) { stores(h), h.root = PushHeader::kNobody; })) << "nobody sends anything then";
  EXPECT_TRUE(refused([](PushHeader& h) { h.root = 1; })) << "a sum has no root";
  EXPECT_TRUE(refused([&](PushHeader& h) { stores(h), h.group = kAlone | 3; })) << "no rank stores for itself";
  EXPECT_TRUE(refused([&](PushHeader& h) { stores(h), h.priority = 5; }));
  EXPECT_TRUE(refused([&](PushHeader& h) { accumulates(h), h.op = ReduceOp::kMax; }));
  EXPECT_TRUE(refused([&](PushHeader& h) { accumulates(h), h.group = 3; }));
  EXPECT_TRUE(refused([&](PushHeader& h) { accumulates(h), h.flags &= ~kWantsData; }));
  EXPECT_TRUE(refused([&](PushHeader& h) { accumulates(h), h.flags |= kTwoPhase; }));
  for (const OperationKind kind : {OperationKind::kReadFeedback, OperationKind::kWriteFeedback}) {
    const auto feeds = [kind](PushHeader& h) {
      h.kind = kind;
      h.op = ReduceOp::kSum;
      h.dtype = Dtype::kFloat32;
    };
    EXPECT_FALSE(refused(feeds));
    EXPECT_FALSE(refused([&](PushHeader& h) { feeds(h), h.flags |= kForHost; }));
    for (const std::uint8_t never : {kTwoPhase, kCompressed, kUnrounded}) {
      EXPECT_TRUE(refused([&](PushHeader& h) { feeds(h), h.flags |= never; }));
    }
    EXPECT_TRUE(refused([&](PushHeader& h) { feeds(h), h.op = ReduceOp::kAverage; }));
    EXPECT_TRUE(refused([&](PushHeader& h) { feeds(h), h.dtype = Dtype::kFloat64; }));
    EXPECT_TRUE(refused([&](PushHeader& h) { feeds(h), h.flags &= ~kHasPayload; }));
  }
  EXPECT_FALSE(refused([](PushHeader& h) { h.flags |= kTwoPhase; }));
  EXPECT_FALSE(refused([](PushHeader& h) { h.flags |= kTwoPhase | kForHost, h.place = PushHeader::kLogged + 1; }));
  EXPECT_FALSE(refused([](PushHeader& h) { h.flags |= kTwoPhase, h.place = PushHeader::kLogged; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags |= kTwoPhase, h.place = PushHeader::kLogged + 1; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags = kTwoPhase | kHasPayload | kIsPush; })) << "its pull may never come";
  EXPECT_TRUE(refused([](PushHeader& h) { h.length = 0; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.length = 4001; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.place = 1; })) << "only a relay is told where to go on to";
  EXPECT_TRUE(refused([](PushHeader& h) { h.priority = -1; }));
  EXPECT_FALSE(refused([](PushHeader& h) {
    h.flags |= kForHost;
    h.priority = -1;
    h.place = 1;
  }));
}

// A compressed push is one of at most 32-bit floats that are added, with its payload, and that asks for the result at
// once.
TEST(PushHeader, WhatMayBeCompressed) {
  const auto refused = [](auto change) {
    PushHeader header = valid();
    header.dtype = Dtype::kFloat32;
    header.flags |= kCompressed;
    change(header);
    return !codec::accepts(header);
  };
  EXPECT_FALSE(refused([](PushHeader&) {}));
  EXPECT_FALSE(refused([](PushHeader& h) { h.op = ReduceOp::kSum; }));
  EXPECT_FALSE(refused([](PushHeader& h) { h.flags &= static_cast<std::uint8_t>(~kWantsData); }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.op = ReduceOp::kMax; }));
  EXPECT_FALSE(refused([](PushHeader& h) { h.dtype = Dtype::kBfloat16; }));
  EXPECT_FALSE(refused([](PushHeader& h) { h.dtype = Dtype::kFloat16; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.dtype = Dtype::kFloat64; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.dtype = Dtype::kInt32; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags |= kTwoPhase; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags |= kForHost; }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags &= static_cast<std::uint8_t>(~kHasPayload); }));
  EXPECT_TRUE(refused([](PushHeader& h) { h.flags &= static_cast<std::uint8_t>(~kIsPull); }));
}

}  // namespace
}  // namespace bps::tensor
