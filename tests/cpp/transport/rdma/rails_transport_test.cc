// SPDX-License-Identifier: Apache-2.0
// Two rails between two sides, both by the same device: each has contexts, and so keys, of its own.

#include "transport/two_sides.h"

namespace bps::transport::testing {
namespace {

class RailsTransportTest : public TwoSides {
 protected:
  void SetUp() override {
    TwoSides::SetUp();
    if (IsSkipped()) return;
    first_accepted = callee->data;
    second = caller->connect_data(address, 1);
    ASSERT_TRUE(callee->sink.wait([&](const Recorder&) { return callee->data != first_accepted; }));
    source = caller->call([&] { return caller->transport->register_memory(sent); });
    target = callee->call([&] { return callee->transport->register_memory(landed); });
  }
  void TearDown() override {
    if (caller) caller->call([&] { source.reset(); });
    if (callee) callee->call([&] { target.reset(); });
  }
  WriteOp write_to(std::size_t rail, std::uint64_t offset, std::uint32_t immediate) const {
    return {.source = source.get(), .length = 100, .target = target->remote(offset, 100, rail), .immediate = immediate};
  }

  Bytes sent = Bytes(100, std::byte{0x11});
  Bytes landed = Bytes(300, std::byte{0xee});
  RegionPtr source;
  RegionPtr target;
  DataEndpoint* first_accepted = nullptr;
  DataEndpoint* second = nullptr;
};

TEST_P(RailsTransportTest, AConnectionTakesTheRailsOfItsNumber) {
  EXPECT_EQ(caller->transport->rail_pairs(address), 2U);
  EXPECT_EQ(data->rails.here, 0U);
  EXPECT_EQ(data->rails.there, 0U);
  EXPECT_EQ(second->rails.here, 1U);
  EXPECT_EQ(second->rails.there, 1U);
  EXPECT_EQ(first_accepted->rails.here, 0U);
  EXPECT_EQ(callee->data->rails.here, 1U);
}

TEST_P(RailsTransportTest, MemoryIsWrittenByEachRailUnderItsOwnKey) {
  post_all(*caller, data, {write_to(0, 0, 1)});
  post_all(*caller, second, {write_to(1, 200, 2)});
  EXPECT_EQ(Bytes(landed.begin(), landed.begin() + 100), sent);
  EXPECT_EQ(Bytes(landed.begin() + 100, landed.begin() + 200), Bytes(100, std::byte{0xee}));
  EXPECT_EQ(Bytes(landed.begin() + 200, landed.end()), sent);
}

TEST_P(RailsTransportTest, ARailThatIsLostLeavesTheOther) {
  const WriteOp wrong = write_to(0, 0, 1);  // the key of the first rail means nothing on the second
  caller->call([&] { return second->write({&wrong, 1}); });
  ASSERT_TRUE(caller->sink.wait([](const Recorder& sink) { return sink.lost == 1; }));
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.lost == 1; }));
  EXPECT_EQ(landed, Bytes(300, std::byte{0xee}));
  post_all(*caller, data, {write_to(0, 100, 2)});
  EXPECT_EQ(Bytes(landed.begin() + 100, landed.begin() + 200), sent);
  EXPECT_EQ(caller->call([&] { return control->send(sent); }), Status::kOk);
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.messages.size() == 1; }));
}

TEST_P(RailsTransportTest, ALostRailIsConnectedAgain) {
  caller->call([&] { caller->transport->close(second); });
  ASSERT_TRUE(callee->sink.wait([](const Recorder& sink) { return sink.lost == 1; }));
  const DataEndpoint* before = callee->data;
  second = caller->connect_data(address, 1);
  ASSERT_TRUE(callee->sink.wait([&](const Recorder&) { return callee->data != before; }));
  post_all(*caller, second, {write_to(1, 0, 3)});
  EXPECT_EQ(Bytes(landed.begin(), landed.begin() + 100), sent);
}

INSTANTIATE_TEST_SUITE_P(Over, RailsTransportTest, ::testing::Values(Way{"rdma-rails", false}), name_of);

}  // namespace
}  // namespace bps::transport::testing
