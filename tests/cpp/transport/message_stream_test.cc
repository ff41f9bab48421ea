// SPDX-License-Identifier: Apache-2.0
#include "transport/message_stream.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <vector>

namespace bps::transport {
namespace {

Digest connection_key() {
  return hmac_sha256({}, {as_bytes("a connection")});
}

// Two streams in one thread, and what the second one hears.
struct Streams {
  Streams(std::optional<MessageKeys> first, std::optional<MessageKeys> second) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    from = std::make_unique<MessageStream>(Fd(fds[0]), std::move(first), kLargest);
    to = std::make_unique<MessageStream>(Fd(fds[1]), std::move(second), kLargest);
    from->start(loop, {[](auto) {}, [](const auto&) {}});
    to->start(loop, {[this](std::span<const std::byte> message) { heard.emplace_back(as_text(message)); },
                     [this](const std::string& reason) { why = reason; }});
  }
  void settle() {
    while (loop.turn(Duration::zero()) > 0) continue;
  }

  static constexpr std::size_t kLargest = 100'000;
  EventLoop loop;
  std::vector<std::string> heard;
  std::string why;
  std::unique_ptr<MessageStream> from, to;
};

TEST(MessageStream, CarriesMessagesWithAndWithoutKeys) {
  const std::vector<std::string> said{"", "a", std::string(5000, 'b'), std::string(100'000, 'c'), "end"};
  const auto carry = [&](std::optional<MessageKeys> first, std::optional<MessageKeys> second) {
    Streams streams(std::move(first), std::move(second));
    for (const std::string& message : said) {
      ASSERT_EQ(streams.from->send(as_bytes(message)), Status::kOk);
      streams.settle();
    }
    EXPECT_EQ(streams.heard, said);
    EXPECT_EQ(streams.why, "");
  };
  carry(std::nullopt, std::nullopt);
  carry(MessageKeys::of_client(connection_key()), MessageKeys::of_server(connection_key()));
}

TEST(MessageStream, APeerThatDoesNotReadIsLost) {
  Streams streams(std::nullopt, std::nullopt);
  const Bytes message(Streams::kLargest);
  std::size_t accepted = 0;
  while (accepted < 10'000 && streams.to->send(message) == Status::kOk) ++accepted;
  EXPECT_GT(accepted, 600U) << "60 MB may wait";
  EXPECT_LT(accepted, 1'000U);
  EXPECT_EQ(streams.why, "") << "not inside send()";
  streams.loop.turn(Duration::zero());
  EXPECT_EQ(streams.why, "it does not read what it is sent");
}

TEST(MessageStream, KeysOfAnotherConnectionOrDirectionAreRefused) {
  const auto refuses = [](std::optional<MessageKeys> first, std::optional<MessageKeys> second) {
    Streams streams(std::move(first), std::move(second));
    EXPECT_EQ(streams.from->send(as_bytes("x")), Status::kOk);
    streams.settle();
    EXPECT_TRUE(streams.heard.empty());
    EXPECT_TRUE(streams.to->was_forged());
    EXPECT_NE(streams.why.find("failed its authentication"), std::string::npos) << streams.why;
    EXPECT_EQ(streams.to->send(as_bytes("y")), Status::kPeerLost);
  };
  refuses(MessageKeys::of_client(Digest{}), MessageKeys::of_server(connection_key()));
  refuses(MessageKeys::of_server(connection_key()), MessageKeys::of_server(connection_key()));  // sent back
}

}  // namespace
}  // namespace bps::transport
