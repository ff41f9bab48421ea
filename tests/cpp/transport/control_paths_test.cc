// SPDX-License-Identifier: Apache-2.0
// Messages over several paths arrive once and in order, whatever becomes of the paths.
#include "transport/control_paths.h"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "core/bytes.h"

namespace bps::transport {
namespace {

// What was sent on it, and what of that has not arrived.
class Wire final : public ControlEndpoint {
 public:
  explicit Wire(std::uint16_t path) : ControlEndpoint(hello_of(path)) {}
  Status send(std::span<const std::byte> message) override {
    under_way.emplace_back(message.begin(), message.end());
    return Status::kOk;
  }
  std::deque<Bytes> under_way;

 private:
  static Hello hello_of(std::uint16_t path) {
    Hello hello;
    hello.path = path;
    return hello;
  }
  void sever() override {}
};

Bytes to_bytes(const std::string& text) {
  return {as_bytes(text).begin(), as_bytes(text).end()};
}

struct Side {
  explicit Side(std::uint16_t paths) {
    for (std::uint16_t i = 1; i <= paths; ++i) wires.push_back(std::make_unique<Wire>(i));
    for (const auto& wire : wires) control.add(wire.get());
  }
  void say(const std::string& text) { EXPECT_EQ(control.send(to_bytes(text)), Status::kOk); }
  // Takes up to `most` messages of what the other side has sent by one of its wires.
  void hear(Wire& wire, std::size_t most = 1000) {
    for (; most > 0 && !wire.under_way.empty(); --most) {
      const Bytes bytes = wire.under_way.front();
      wire.under_way.pop_front();
      if (const auto message = control.receive(bytes)) heard.emplace_back(as_text(*message));
    }
  }
  std::vector<std::unique_ptr<Wire>> wires;
  ControlPaths control;
  std::vector<std::string> heard;
};

TEST(ControlPaths, OnePathAddsNothing) {
  Wire only(0);
  ControlPaths control;
  control.add(&only);
  ASSERT_EQ(control.send(to_bytes("hello")), Status::kOk);
  EXPECT_EQ(only.under_way.front(), to_bytes("hello"));
  EXPECT_EQ(control.unconfirmed(), 0U);
  const Bytes bytes = to_bytes("back");
  EXPECT_EQ(as_text(*control.receive(bytes)), "back");
}

TEST(ControlPaths, WhatALostPathHasNotDeliveredComesByAnother) {
  for (std::size_t arrived = 0; arrived <= 5; ++arrived) {
    Side from(2);
    Side to(2);
    for (const char* text : {"a", "b", "c", "d", "e"}) from.say(text);
    to.hear(*from.wires[0], arrived);
    from.control.remove(from.wires[0].get());
    from.say("f");
    to.hear(*from.wires[1]);
    to.hear(*from.wires[0]);  // late: comes twice
    EXPECT_EQ(to.heard, (std::vector<std::string>{"a", "b", "c", "d", "e", "f"}));
  }
}

TEST(ControlPaths, ASecondLossResendsWhatTheFirstHadResent) {
  Side from(3);
  Side to(3);
  from.say("a");
  from.say("b");
  from.control.remove(from.wires[0].get());
  from.say("c");
  to.hear(*from.wires[1], 1);
  from.control.remove(from.wires[1].get());
  to.hear(*from.wires[2]);
  EXPECT_EQ(to.heard, (std::vector<std::string>{"a", "b", "c"}));
}

TEST(ControlPaths, AReplyConfirms) {
  Side one(2);
  Side other(2);
  one.say("a");
  one.say("b");
  other.hear(*one.wires[0]);
  EXPECT_EQ(one.control.unconfirmed(), 2U);
  other.say("c");
  one.hear(*other.wires[0]);
  EXPECT_EQ(one.control.unconfirmed(), 0U);
  EXPECT_EQ(one.heard, (std::vector<std::string>{"c"}));
}

TEST(ControlPaths, WhatIsKeptIsBoundedAlthoughThePeerSaysNothing) {
  Side one(2);
  Side other(2);
  for (int i = 0; i < 1000; ++i) {
    one.say("x");
    other.hear(*one.wires[0]);
    one.hear(*other.wires[0]);
    ASSERT_LE(one.control.unconfirmed(), 16U);
  }
  EXPECT_EQ(other.heard.size(), 1000U);
  EXPECT_TRUE(one.heard.empty()) << "a confirmation is no message";
}

TEST(ControlPaths, MalformedAndEarlyMessagesAreDropped) {
  Side one(2);
  Side other(2);
  EXPECT_FALSE(one.control.receive(to_bytes("short")));
  other.say("a");
  other.say("b");
  Bytes second = other.wires[0]->under_way.back();
  EXPECT_FALSE(one.control.receive(second));
  one.hear(*other.wires[0]);
  EXPECT_EQ(one.heard, (std::vector<std::string>{"a", "b"}));
}

}  // namespace
}  // namespace bps::transport
