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

// One copy, between messages of one peer alone, and what a full socket takes in parts.
TEST(MessageStream, SharedMessagesGoOutInOrder) {
  const auto carry = [&](std::optional<MessageKeys> first, std::optional<MessageKeys> second) {
    Streams streams(std::move(first), std::move(second));
    std::vector<std::string> said;
    for (const std::size_t size : {0UL, 100UL, 252UL, 253UL, 5'000UL, 100'000UL, 99'999UL, 100'000UL, 100'000UL}) {
      const auto own = std::to_string(size);
      const std::string text(size, static_cast<char>('a' + said.size()));
      const auto shared = std::make_shared<const SharedMessage>(as_bytes(text));
      ASSERT_EQ(streams.from->send(as_bytes(own)), Status::kOk);
      ASSERT_EQ(streams.from->send(shared), Status::kOk);
      ASSERT_EQ(streams.from->send(shared), Status::kOk);
      said.insert(said.end(), {own, text, text});
    }
    EXPECT_EQ(streams.from->send(std::make_shared<const SharedMessage>(Bytes(Streams::kLargest + 1))),
              Status::kProtocol);
    EXPECT_FALSE(streams.from->is_flushed());
    streams.settle();
    EXPECT_EQ(streams.heard, said);
    EXPECT_EQ(streams.why, "");
    EXPECT_TRUE(streams.from->is_flushed());
  };
  carry(std::nullopt, std::nullopt);
  carry(MessageKeys::of_client(connection_key()), MessageKeys::of_server(connection_key()));
}

TEST(MessageStream, APeerThatDoesNotReadSharedMessagesIsLost) {
  Streams streams(std::nullopt, std::nullopt);
  const auto message = std::make_shared<const SharedMessage>(Bytes(Streams::kLargest));
  std::size_t accepted = 0;
  while (accepted < 10'000 && streams.to->send(message) == Status::kOk) ++accepted;
  EXPECT_GT(accepted, 600U) << "60 MB may wait";
  EXPECT_LT(accepted, 1'000U);
}

// A code over a digest is none of a short message that has the same bytes.
TEST(MessageStream, ALongMessageIsNotAShortOne) {
  const Bytes message(300);
  MessageSigner one(connection_key(), "a direction"), other(connection_key(), "a direction");
  const Digest digest = sha256(message);
  EXPECT_EQ(one.sign(message), other.sign(digest));
  EXPECT_NE(one.sign(std::span(digest)), other.sign(digest));
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

// It fills the socket again and again, and still another one is heard in the same turn, and timers go on.
TEST(MessageStream, APeerThatTalksWithoutEndHasItsTurnAndNoMore) {
  EventLoop loop;
  const auto listen = [&](std::size_t& heard, Fd& far) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    far = Fd(fds[0]);
    auto stream = std::make_unique<MessageStream>(Fd(fds[1]), std::nullopt, 1000);
    stream->start(loop, {[&heard](auto) { ++heard; }, [](const auto&) {}});
    return stream;
  };
  std::size_t loud = 0, quiet = 0;
  Fd talker, other;
  const auto of_talker = listen(loud, talker);
  const auto of_other = listen(quiet, other);
  const std::vector<std::uint32_t> empty_messages(10'000, 0);
  const auto say = [](const Fd& by, std::size_t count, const std::vector<std::uint32_t>& all) {
    return ::send(by.get(), all.data(), count * sizeof(std::uint32_t), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  std::size_t before = 0;
  for (std::size_t turn = 1; turn <= 50; ++turn) {
    (void)say(talker, empty_messages.size(), empty_messages);
    ASSERT_EQ(say(other, 1, empty_messages), 4);
    loop.turn(Duration::zero());
    EXPECT_EQ(quiet, turn);
    EXPECT_LE(loud - before, 3 * TurnBudget::kMessages);
    EXPECT_GT(loud, before);
    before = loud;
  }
  talker.reset();
  while (loop.turn(Duration::zero()) > 0) continue;
  EXPECT_GT(loud, empty_messages.size()) << "what it had said is heard, too";
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
