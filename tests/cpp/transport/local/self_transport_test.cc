// SPDX-License-Identifier: Apache-2.0
// A connection within the process keeps the contract of Endpoint: an end that is given up accepts and delivers nothing.
#include "transport/local/self_transport.h"

#include <gtest/gtest.h>

#include <span>
#include <string>

#include "core/bytes.h"

namespace bps::transport::local {
namespace {

struct Heard final : ControlSink, DataSink {
  void on_message(ControlEndpoint&, std::span<const std::byte>) override { ++messages; }
  void on_write(DataEndpoint&, std::uint32_t, std::uint64_t) override { ++writes; }
  void on_posting(DataEndpoint&, std::span<const std::byte>, const RemoteSpan&) override { ++postings; }
  void on_written(DataEndpoint&, std::uint64_t) override { ++written; }
  void on_lost(Endpoint&, const std::string&) override { ++losses; }
  int messages = 0, writes = 0, postings = 0, written = 0, losses = 0;
};

class SelfTransportTest : public ::testing::Test {
 protected:
  ConnectRequest request() { return {{}, {}, Deadline::after(1), "self"}; }

  Counters counters;
  SelfTransport transport{counters};
  Heard caller, called;
  ControlEndpoint* control = transport.attach(transport.connect_control(request()), caller);
  ControlEndpoint* far_control = transport.accept_control(transport.incoming(), called);
  DataEndpoint* data = transport.attach(transport.connect_data(request()), caller);
  DataEndpoint* far_data = transport.accept_data(transport.incoming(), called);
  const WriteOp write{.immediate = 1, .token = 7};
};

TEST_F(SelfTransportTest, AnEndThatIsGivenUpDeliversNothing) {
  ASSERT_EQ(control->send(as_bytes(std::string("before"))), Status::kOk);
  ASSERT_EQ(data->write({&write, 1}), 1U);
  const Posting posted{};
  ASSERT_EQ(data->direct()->post({&posted, 1}), 1U);
  far_control->abandon();
  far_data->abandon();
  transport.poll();
  EXPECT_EQ(called.messages + called.writes + called.postings + called.losses, 0);
  EXPECT_EQ(caller.written, 1) << "its memory may be used again";
  EXPECT_TRUE(transport.arm()) << "nothing waits for ever";
}

TEST_F(SelfTransportTest, AnEndThatIsGivenUpAcceptsNothing) {
  control->abandon();
  data->abandon();
  EXPECT_EQ(control->send(as_bytes(std::string("late"))), Status::kPeerLost);
  EXPECT_EQ(data->write({&write, 1}), 0U);
  const Posting posted{};
  EXPECT_EQ(data->direct()->post({&posted, 1}), 0U);
  transport.poll();
  EXPECT_EQ(called.messages + called.writes + called.postings, 0);
}

}  // namespace
}  // namespace bps::transport::local
