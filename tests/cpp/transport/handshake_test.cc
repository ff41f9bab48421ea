// SPDX-License-Identifier: Apache-2.0
#include "transport/handshake.h"
#include "transport/job_name.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <thread>

#include "concatenate.h"
#include "transport/handshake_messages.h"

namespace bps::transport {
namespace {

const Credentials kOurs = Credentials::from("job", "secret");

struct Pair {
  Fd caller, callee;
};
Pair connected_pair() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {Fd(fds[0]), Fd(fds[1])};
}

// The called side until it has decided, or until `patience_ms` have passed without a byte.
ServerHandshake::State serve(ServerHandshake& handshake, int patience_ms = 5000) {
  for (;;) {
    const auto state = handshake.advance();
    if (state != ServerHandshake::State::kPending) return state;
    pollfd wait{handshake.fd(), POLLIN, 0};
    if (::poll(&wait, 1, patience_ms) == 0) return state;
  }
}

struct Outcome {
  ServerHandshake::State state;
  Hello hello;
  std::optional<Refusal> refusal;  // what the caller was told
  std::string text;
  std::optional<ErrorCode> code;
};
Outcome meet(const Credentials& caller, const Credentials& callee, const Hello& hello = {}) {
  Pair pair = connected_pair();
  ServerHandshake handshake(std::move(pair.callee), callee);
  Outcome outcome{};
  std::thread calling([&] {
    try {
      client_handshake(pair.caller.get(), hello, caller, Deadline::after(5), "server 1");
    } catch (const HandshakeError& error) {
      outcome.refusal = error.refusal();
      outcome.code = error.code();
      outcome.text = error.what();
    }
    pair.caller.reset();
  });
  outcome.state = serve(handshake);
  calling.join();
  outcome.hello = handshake.hello();
  return outcome;
}

// What a caller sees of a callee that answers `reply` and hangs up.
Outcome call_unauthenticated(std::span<const std::byte> reply) {
  Pair pair = connected_pair();
  EXPECT_EQ(::send(pair.callee.get(), reply.data(), reply.size(), 0), static_cast<ssize_t>(reply.size()));
  ::shutdown(pair.callee.get(), SHUT_WR);
  Outcome outcome{};
  try {
    client_handshake(pair.caller.get(), {}, kOurs, Deadline::after(5), "server 1");
  } catch (const HandshakeError& error) {
    outcome.refusal = error.refusal();
    outcome.code = error.code();
    outcome.text = error.what();
  }
  return outcome;
}

// A caller's hello as it goes over the wire.
Bytes hello_bytes(const Credentials& credentials) {
  Pair pair = connected_pair();
  EXPECT_THROW(client_handshake(pair.caller.get(), {}, credentials, Deadline::after(0), "nobody"), HandshakeError);
  Bytes bytes(256);
  const auto got = ::recv(pair.callee.get(), bytes.data(), bytes.size(), 0);
  bytes.resize(static_cast<std::size_t>(got));
  return bytes;
}

TEST(Handshake, MembersOfAJobLetEachOtherIn) {
  const Hello hello{.node = 7, .client_loop = 2, .server_loop = 3, .plane = Plane::kData};
  const Outcome outcome = meet(kOurs, kOurs, hello);
  EXPECT_EQ(outcome.state, ServerHandshake::State::kAccepted);
  EXPECT_FALSE(outcome.refusal) << outcome.text;
  EXPECT_EQ(outcome.hello.node, 7U);
  EXPECT_EQ(outcome.hello.client_loop, 2);
  EXPECT_EQ(outcome.hello.server_loop, 3);
  EXPECT_EQ(outcome.hello.plane, Plane::kData);
}

// The bytes are part of the protocol: tests/rdma/test_rdma_unauthenticated.py makes them a second time.
TEST(Handshake, GoldenBytes) {
  const auto fill = [](auto& bytes, unsigned from) {
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(from + i);
  };
  ClientHello hello{.preamble = Preamble(HandshakeKind::kHello, Plane::kData),
                    .hello = {.node = 0x01020304,
                              .client_loop = 0x0506,
                              .server_loop = 0x0708,
                              .plane = Plane::kData,
                              .path = 0x090a,
                              .stream = 0x0b0c}};
  fill(hello.job, 0x20);
  fill(hello.nonce, 0x40);
  const Bytes expected =
      concatenate({as_bytes({"BPSR\x15\0\x01\x02\4\3\2\1\6\5\10\7\x0a\x09\x0c\x0b", 20}), hello.job, hello.nonce});
  EXPECT_TRUE(std::ranges::equal(codec::encode(hello), expected));
  EXPECT_TRUE(std::ranges::equal(codec::encode(Preamble(HandshakeKind::kRefusal, Refusal::kSecret)),
                                 as_bytes({"BPSR\x15\0\x04\x03", 8})));
  Challenge challenge{.preamble = Preamble(HandshakeKind::kChallenge)};
  fill(challenge.nonce, 0x60);
  challenge.view = {.incarnation = 0x05060708'090a0b0c, .epoch = 0x01020304};
  fill(challenge.mac, 0x80);
  EXPECT_TRUE(std::ranges::equal(codec::encode(challenge),
                                 concatenate({as_bytes({"BPSR\x15\0\x02\0", 8}), challenge.nonce,
                                              as_bytes({"\x0c\x0b\x0a\x09\x08\7\6\5\4\3\2\1", 12}), challenge.mac})));
}

TEST(Handshake, EmptySecretsWork) {
  EXPECT_EQ(meet(Credentials::from("j", ""), Credentials::from("j", "")).state, ServerHandshake::State::kAccepted);
}

TEST(Handshake, AnotherSecretIsNoticedByTheCaller) {
  const Outcome outcome = meet(Credentials::from("job", "wrong"), kOurs);
  EXPECT_EQ(outcome.state, ServerHandshake::State::kRefused);
  EXPECT_EQ(outcome.code, ErrorCode::kAuthentication);
  EXPECT_EQ(outcome.refusal, Refusal::kSecret);
  EXPECT_EQ(outcome.text, "server 1 has another secret");
}

TEST(Handshake, AnotherJobIsToldSo) {
  const Outcome outcome = meet(Credentials::from("other", "secret"), kOurs);
  EXPECT_EQ(outcome.state, ServerHandshake::State::kRefused);
  EXPECT_EQ(outcome.code, ErrorCode::kAuthentication);
  EXPECT_EQ(outcome.refusal, Refusal::kJob);
}

TEST(Handshake, WhoHasTheSecretIsToldTheNameOfTheOtherJob) {
  EXPECT_EQ(meet(Credentials::from("other", "secret"), Credentials::from("job", "secret")).text,
            "server 1 belongs to another job, 'job', and this process to the job 'other'");
  EXPECT_EQ(meet(Credentials::from("other", "secret"), Credentials::from("", "secret")).text,
            "server 1 belongs to another job, without a name, and this process to the job 'other'");
  EXPECT_EQ(meet(Credentials::from("other", "guessed"), Credentials::from("job", "secret")).text,
            "server 1 belongs to another job");
  const std::string longest(64, 'a');
  EXPECT_NE(meet(Credentials::from("b", "s"), Credentials::from(longest + "c", "s")).text.find("'" + longest + "'"),
            std::string::npos);
}

TEST(Handshake, NamesAreEncrypted) {
  const Bytes hello = hello_bytes(kOurs);
  const SealedName sealed = seal_name(Credentials::from("a name", "secret"), hello);
  EXPECT_EQ(std::string(as_text(sealed.text)).find("a name"), std::string::npos);
  EXPECT_EQ(open_name(Credentials::from("another", "secret"), hello, sealed), "a name");
  EXPECT_EQ(open_name(Credentials::from("another", "wrong"), hello, sealed), std::nullopt);
  SealedName changed = sealed;
  changed.text[0] ^= std::byte{1};
  EXPECT_EQ(open_name(Credentials::from("a name", "secret"), hello, changed), std::nullopt);
}

TEST(Handshake, AnotherVersionIsToldSo) {
  Bytes hello = hello_bytes(kOurs);
  hello[4] = std::byte{99};
  for (const std::size_t length : {hello.size(), std::size_t{8}}) {  // other versions may say less, or more
    Pair pair = connected_pair();
    ServerHandshake handshake(std::move(pair.callee), kOurs);
    ASSERT_EQ(::send(pair.caller.get(), hello.data(), length, 0), static_cast<ssize_t>(length));
    EXPECT_EQ(handshake.advance(), ServerHandshake::State::kPending) << "the reason must arrive before the end";
    Bytes reply(64);
    ASSERT_EQ(::recv(pair.caller.get(), reply.data(), reply.size(), MSG_WAITALL), 8);
    reply.resize(8);
    const Outcome outcome = call_unauthenticated(reply);
    EXPECT_EQ(outcome.code, ErrorCode::kVersion);
    pair.caller.reset();
    EXPECT_EQ(serve(handshake), ServerHandshake::State::kRefused);
  }
}

TEST(Handshake, TheCallerSeesANewerCallee) {
  const Outcome outcome = call_unauthenticated(as_bytes({"BPSR\x16\0\x02\0", 8}));
  EXPECT_EQ(outcome.code, ErrorCode::kVersion);
  EXPECT_EQ(outcome.text, "server 1 speaks version 22 of the protocol, this process version 21");
}

TEST(Handshake, PeersOfOtherProtocolsAreRefusedByTheClient) {
  EXPECT_EQ(call_unauthenticated(as_bytes("HTTP/1.1 400 Bad Request\r\n\r\n")).code, ErrorCode::kUnreachable);
  EXPECT_EQ(call_unauthenticated({}).text, "server 1 closed the connection during the handshake");
  EXPECT_EQ(call_unauthenticated(as_bytes("BP")).code, ErrorCode::kUnreachable);
}

TEST(Handshake, TheCallerDoesNotWaitForEver) {
  Pair pair = connected_pair();
  const auto start = now_ns();
  EXPECT_THROW(client_handshake(pair.caller.get(), {}, kOurs, Deadline::after(0.05), "server 1"), HandshakeError);
  EXPECT_LT(now_ns() - start, 20'000'000'000U);
}

TEST(Handshake, GarbageGetsNoAnswer) {
  for (const std::string_view garbage :
       {std::string_view("GET / HTTP/1.1\r\n"), std::string_view("\0\0\0\0\0\0\0\0", 8)}) {
    Pair pair = connected_pair();
    ServerHandshake handshake(std::move(pair.callee), kOurs);
    ASSERT_GT(::send(pair.caller.get(), garbage.data(), garbage.size(), 0), 0);
    EXPECT_EQ(handshake.advance(), ServerHandshake::State::kRefused);
    char byte = 0;
    EXPECT_LT(::recv(pair.caller.get(), &byte, 1, MSG_DONTWAIT), 0);
  }
}

TEST(Handshake, AnUnknownPlaneIsRefused) {
  Bytes hello = hello_bytes(kOurs);
  hello[7] = std::byte{4};
  Pair pair = connected_pair();
  ServerHandshake handshake(std::move(pair.callee), kOurs);
  ASSERT_GT(::send(pair.caller.get(), hello.data(), hello.size(), 0), 0);
  EXPECT_EQ(handshake.advance(), ServerHandshake::State::kRefused);
}

TEST(Handshake, AForgedProofIsRefusedWithTheReason) {
  const Bytes hello = hello_bytes(kOurs);
  Pair pair = connected_pair();
  ServerHandshake handshake(std::move(pair.callee), kOurs);
  ASSERT_GT(::send(pair.caller.get(), hello.data(), hello.size(), 0), 0);
  EXPECT_EQ(handshake.advance(), ServerHandshake::State::kPending);
  Bytes challenge(68);
  ASSERT_EQ(::recv(pair.caller.get(), challenge.data(), challenge.size(), MSG_WAITALL), 68);
  // The server's own proof, sent back, does not prove anything.
  ASSERT_EQ(::send(pair.caller.get(), challenge.data() + 36, 32, 0), 32);
  EXPECT_EQ(handshake.advance(), ServerHandshake::State::kPending);
  Bytes reply(8);
  ASSERT_EQ(::recv(pair.caller.get(), reply.data(), reply.size(), MSG_WAITALL), 8);
  EXPECT_EQ(call_unauthenticated(reply).refusal, Refusal::kSecret);
  pair.caller.reset();
  EXPECT_EQ(serve(handshake), ServerHandshake::State::kRefused);
}

// Passes what a caller says on to a handshake, byte by byte; `limit` bytes at most, then hangs up.
Outcome trickle(std::size_t limit) {
  Pair outside = connected_pair();
  Pair inside = connected_pair();
  ServerHandshake handshake(std::move(inside.callee), kOurs);
  Outcome outcome{};
  std::thread calling([&] {
    try {
      client_handshake(outside.caller.get(), {}, kOurs, Deadline::after(5), "server 1");
    } catch (const HandshakeError& error) {
      outcome.refusal = error.refusal();
    }
    outside.caller.reset();
  });
  std::array<std::byte, 256> buffer;
  outcome.state = ServerHandshake::State::kPending;
  for (std::size_t passed = 0; outcome.state == ServerHandshake::State::kPending;) {
    std::byte byte{};
    if (passed++ == limit || ::recv(outside.callee.get(), &byte, 1, 0) != 1) {
      inside.caller.reset();
      outcome.state = serve(handshake);
      break;
    }
    EXPECT_EQ(::send(inside.caller.get(), &byte, 1, 0), 1);
    outcome.state = handshake.advance();
    const auto back = ::recv(inside.caller.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (back <= 0) continue;
    EXPECT_EQ(::send(outside.callee.get(), buffer.data(), static_cast<std::size_t>(back), 0), back);
  }
  outside.callee.reset();
  calling.join();
  return outcome;
}

TEST(Handshake, SingleBytesAreEnough) {
  const Outcome outcome = trickle(1000);
  EXPECT_EQ(outcome.state, ServerHandshake::State::kAccepted);
  EXPECT_FALSE(outcome.refusal);
}

TEST(Handshake, HangingUpAtAnyByteIsHarmless) {
  for (std::size_t limit = 0; limit < 84; ++limit) {
    const Outcome outcome = trickle(limit);
    EXPECT_EQ(outcome.state, ServerHandshake::State::kRefused) << limit;
    EXPECT_EQ(outcome.refusal, Refusal::kSilent) << limit;
  }
  EXPECT_EQ(trickle(84).state, ServerHandshake::State::kAccepted);
}

TEST(Handshake, NothingIsReadBeyondTheHello) {
  Pair pair = connected_pair();
  ServerHandshake handshake(std::move(pair.callee), kOurs);
  std::thread calling([&] {
    client_handshake(pair.caller.get(), {}, kOurs, Deadline::after(5), "server 1");
    EXPECT_EQ(::send(pair.caller.get(), "next", 4, 0), 4);
  });
  EXPECT_EQ(serve(handshake), ServerHandshake::State::kAccepted);
  calling.join();
  char next[8];
  EXPECT_EQ(::recv(handshake.take().socket.get(), next, sizeof next, 0), 4);
}

// Both sides of one handshake.
struct Met {
  std::optional<Session> client;
  std::optional<AuthenticatedSocket> server;
};
Met sessions_of(const Credentials& client, const Credentials& server) {
  Pair pair = connected_pair();
  ServerHandshake handshake(std::move(pair.callee), server);
  Met met;
  std::thread calling([&] {
    try {
      met.client = client_handshake(pair.caller.get(), {}, client, Deadline::after(5), "server 1");
    } catch (const HandshakeError&) {
    }
    pair.caller.reset();
  });
  if (serve(handshake) == ServerHandshake::State::kAccepted) met.server = handshake.take();
  calling.join();
  return met;
}

TEST(Handshake, EachConnectionHasAKeyOfItsOwn) {
  const Met one = sessions_of(kOurs, kOurs);
  const Met other = sessions_of(kOurs, kOurs);
  ASSERT_TRUE(one.client && one.server && other.client && other.server);
  EXPECT_EQ(one.client->key, one.server->key);
  EXPECT_EQ(other.client->key, other.server->key);
  EXPECT_NE(one.client->key, other.client->key);
}

TEST(Handshake, TheServerTellsItsView) {
  Credentials scheduler = kOurs;
  scheduler.view = {.incarnation = 4711, .epoch = 3};
  const Met met = sessions_of(kOurs, scheduler);
  ASSERT_TRUE(met.client && met.server);
  EXPECT_EQ(met.client->view, scheduler.view);
  EXPECT_EQ(met.client->key, met.server->key);
}

TEST(Handshake, AnotherRunOrEpochIsAnotherJob) {
  const ViewId now{.incarnation = 2, .epoch = 1};
  EXPECT_TRUE(sessions_of(kOurs.of(now), kOurs.of(now)).server);
  for (const ViewId& other : {ViewId{.incarnation = 1, .epoch = 1}, ViewId{.incarnation = 2, .epoch = 2}}) {
    const Outcome outcome = meet(kOurs.of(other), kOurs.of(now));
    EXPECT_EQ(outcome.state, ServerHandshake::State::kRefused);
    EXPECT_EQ(outcome.refusal, Refusal::kJob);
  }
  EXPECT_FALSE(sessions_of(kOurs, kOurs.of(now)).server);
  EXPECT_FALSE(sessions_of(Credentials::from("job", "wrong").of(now), kOurs.of(now)).server);
}

}  // namespace
}  // namespace bps::transport
