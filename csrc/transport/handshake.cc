// SPDX-License-Identifier: Apache-2.0
#include "transport/handshake.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "core/interrupt.h"
#include "core/limits.h"
#include "transport/handshake_messages.h"
#include "transport/job_name.h"

namespace bps::transport {
namespace {

// A handshake takes milliseconds, unless one side is stopped.
constexpr auto kLongHandshake = std::chrono::seconds(1);

// Both sides sign the random bytes of both, each under its own label: a proof can neither be replayed nor sent back to
// the side that made it.
Mac sign(const Credentials& credentials, std::string_view label, std::span<const std::byte> hello, const Nonce& nonce,
         const ViewId& view) {
  return hmac_sha256(credentials.key, {as_bytes(label), hello, nonce, codec::encode(view)});
}

JobId first_half(const Digest& digest) {
  JobId job{};
  std::copy_n(digest.begin(), job.size(), job.begin());
  return job;
}

[[noreturn]] void fail(const std::string& what, const std::string& hint) {
  throw HandshakeError(Refusal::kSilent, ErrorCode::kUnreachable, what, hint);
}

[[noreturn]] void fail_version(const std::string& whom, std::uint16_t theirs) {
  throw HandshakeError(Refusal::kVersion, ErrorCode::kVersion,
                       whom + " speaks version " + std::to_string(theirs) + " of the protocol, this process version " +
                           std::to_string(kProtocolVersion),
                       "install the same bps_rdma version everywhere");
}

constexpr double kPause_s = 0.005;  // no event tells that a shortage is over

// Waits after an attempt that failed. It pauses where the system is short of something, as the socket looks ready then.
void await(int fd, short events, const Deadline& deadline, const std::string& whom) {
  if (is_shortage(errno)) sleep_until(Deadline::after(std::min(kPause_s, deadline.left_ms() / 1e3)));
  pollfd wait{fd, events, 0};
  const int ready = poll_until(wait, deadline);
  if (ready == 0) fail(whom + " did not complete the handshake in time", "check that it is running and not stopped");
  if (ready < 0) throw_errno("cannot wait for " + whom);
}

[[noreturn]] void fail_closed(const std::string& whom) {
  fail(whom + " closed the connection during the handshake", "see its log, and try again");
}

void send_bytes(int fd, std::span<const std::byte> bytes, const Deadline& deadline, const std::string& whom) {
  while (!bytes.empty()) {
    const auto sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK || is_shortage(errno)) {
      await(fd, POLLOUT, deadline, whom);
    } else if (errno != EINTR) {
      return;  // the connection is closed; a refusal that the server sent before says more than this error
    }
  }
}

void receive_bytes(int fd, std::span<std::byte> bytes, const Deadline& deadline, const std::string& whom) {
  while (!bytes.empty()) {
    const auto got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || is_shortage(errno))) {
      await(fd, POLLIN, deadline, whom);
    } else if (got == 0 || errno != EINTR) {
      fail_closed(whom);
    }
  }
}

constexpr const char* kOtherJobHint =
    "set the same BPS_JOB_ID on every node of a job, and give each job a port of its own";

// Throws, because the server belongs to another job. The server tells the name of that next.
[[noreturn]] void fail_job(int fd, const Credentials& credentials, std::span<const std::byte> hello,
                           const Deadline& deadline, const std::string& whom) {
  std::array<std::byte, codec::kSize<SealedName>> bytes{};
  receive_bytes(fd, bytes, deadline, whom);
  const auto theirs = open_name(credentials, hello, *codec::decode<SealedName>(bytes));
  if (!theirs || *theirs == credentials.name) throw_refused(Refusal::kJob, kProtocolVersion, whom);
  const auto shown = [](const std::string& name) { return name.empty() ? "without a name" : "'" + name + "'"; };
  throw HandshakeError(
      Refusal::kJob, ErrorCode::kAuthentication,
      whom + " belongs to another job, " + shown(*theirs) + ", and this process to the job " + shown(credentials.name),
      kOtherJobHint);
}

// Reads a preamble of this kind into the first bytes of `message`. `on_other_job` may throw what is known of that job.
void receive_preamble(int fd, std::span<std::byte> message, HandshakeKind kind, const Deadline& deadline,
                      const std::string& whom, const std::function<void()>& on_other_job = nullptr) {
  const auto bytes = message.first(codec::kSize<Preamble>);
  receive_bytes(fd, bytes, deadline, whom);
  const Preamble preamble = *codec::decode<Preamble>(bytes);
  if (preamble.magic != kSocketMagic) {
    throw HandshakeError(Refusal::kSilent, ErrorCode::kUnreachable, whom + " does not speak the protocol of bps_rdma",
                         "another program listens there: choose another port", true);
  }
  const bool is_of_other_job = preamble.is(HandshakeKind::kRefusal) && Refusal{preamble.detail} == Refusal::kJob;
  if (is_of_other_job && preamble.version == kProtocolVersion && on_other_job) on_other_job();
  if (preamble.is(HandshakeKind::kRefusal)) throw_refused(Refusal{preamble.detail}, preamble.version, whom);
  if (preamble.version != kProtocolVersion) fail_version(whom, preamble.version);
  if (!preamble.is(kind)) fail(whom + " sent an unexpected message", "install the same bps_rdma version everywhere");
}

}  // namespace

void throw_secret(const std::string& whom) {
  throw HandshakeError(Refusal::kSecret, ErrorCode::kAuthentication, whom + " has another secret",
                       "set the same BPS_SECRET or BPS_SECRET_FILE on every node");
}

void throw_refused(Refusal refusal, std::uint16_t version, const std::string& whom) {
  switch (refusal) {
    case Refusal::kVersion: fail_version(whom, version);
    case Refusal::kSecret: throw_secret(whom);
    case Refusal::kJob:
      throw HandshakeError(Refusal::kJob, ErrorCode::kAuthentication, whom + " belongs to another job", kOtherJobHint);
    case Refusal::kSilent: break;
  }
  fail(whom + " refused the connection", "see its log");
}

Credentials Credentials::from(std::string_view job_name, std::string_view secret) {
  return {.job = first_half(sha256(as_bytes(job_name))),
          .key = hmac_sha256(as_bytes(secret), {as_bytes("job"), as_bytes(job_name)}),
          .name = std::string(job_name),
          .names = hmac_sha256(as_bytes(secret), {as_bytes("names of jobs")})};
}

Credentials Credentials::of(const ViewId& which) const {
  return {.job = first_half(hmac_sha256(key, {as_bytes("view"), job, codec::encode(which)})), .key = key};
}

Session client_handshake(int fd, const Hello& hello, const Credentials& credentials, const Deadline& deadline,
                         const std::string& whom) {
  ClientHello message{.preamble = Preamble(HandshakeKind::kHello, hello.plane), .hello = hello, .job = credentials.job};
  random_bytes(message.nonce);
  const auto sent = codec::encode(message);
  send_bytes(fd, sent, deadline, whom);

  std::array<std::byte, codec::kSize<Challenge>> received{};
  receive_preamble(fd, received, HandshakeKind::kChallenge, deadline, whom,
                   [&] { fail_job(fd, credentials, sent, deadline, whom); });
  receive_bytes(fd, std::span(received).subspan(codec::kSize<Preamble>), deadline, whom);
  const auto challenge = codec::decode<Challenge>(received);
  const auto signed_as = [&](std::string_view label) {
    return sign(credentials, label, sent, challenge->nonce, challenge->view);
  };
  if (!challenge || !equal_constant_time(challenge->mac, signed_as("server"))) throw_secret(whom);
  send_bytes(fd, codec::encode(Proof{signed_as("client")}), deadline, whom);
  std::array<std::byte, codec::kSize<Preamble>> welcome{};
  receive_preamble(fd, welcome, HandshakeKind::kWelcome, deadline, whom);
  return {.key = signed_as("session"), .view = challenge->view};
}

GreetedSocket connect_and_shake(const std::function<Fd()>& connect, const Hello& hello, const Credentials& credentials,
                                const Deadline& deadline, const std::string& whom) {
  for (;;) {
    const auto begin = Clock::now();
    Fd socket = connect();
    try {
      const Session session = client_handshake(socket.get(), hello, credentials, deadline, whom);
      return {std::move(socket), session};
    } catch (const HandshakeError& error) {
      const bool was_stopped = error.refusal() == Refusal::kSilent && Clock::now() - begin > kLongHandshake;
      if (!was_stopped || deadline.passed()) throw;
    }
  }
}

ServerHandshake::ServerHandshake(Fd fd, const Credentials& credentials, CredentialsOf choose)
    : fd_(std::move(fd)), credentials_(credentials), choose_(std::move(choose)) {
  static_assert(codec::kSize<ClientHello> == std::tuple_size_v<decltype(hello_bytes_)>);
  static_assert(codec::kSize<Proof> == std::tuple_size_v<decltype(proof_)>);
}

ServerHandshake::State ServerHandshake::advance() {
  if (step_ == Step::kHello) return read_hello();
  if (step_ == Step::kProof) return read_proof();
  return drain();
}

// Never reads beyond `size`: what follows belongs to the protocol that comes after the handshake.
ServerHandshake::Read ServerHandshake::read_up_to(std::size_t size) {
  std::byte* buffer = step_ == Step::kHello ? hello_bytes_.data() : proof_.data();
  while (have_ < size) {
    const auto got = ::recv(fd_.get(), buffer + have_, size - have_, MSG_DONTWAIT);
    if (got > 0) {
      have_ += static_cast<std::size_t>(got);
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || is_shortage(errno))) {
      return Read::kMore;
    } else if (got == 0 || errno != EINTR) {
      return Read::kClosed;
    }
  }
  return Read::kDone;
}

ServerHandshake::State ServerHandshake::read_hello() {
  // The version is checked as soon as it has arrived: a hello of another version may have another length.
  const Read start = read_up_to(codec::kSize<Preamble>);
  if (start != Read::kDone) return start == Read::kMore ? State::kPending : State::kRefused;
  const Preamble preamble = *codec::decode_front<Preamble>(hello_bytes_);
  if (!preamble.is(HandshakeKind::kHello))
    return State::kRefused;  // a peer that speaks another protocol gets no answer
  if (preamble.version != kProtocolVersion) return refuse(Refusal::kVersion);
  const Read rest = read_up_to(hello_bytes_.size());
  if (rest != Read::kDone) return rest == Read::kMore ? State::kPending : State::kRefused;
  const auto message = codec::decode<ClientHello>(hello_bytes_);
  if (!message) return State::kRefused;
  hello_ = message->hello;
  hello_.plane = Plane{preamble.detail};
  if (choose_) credentials_ = choose_(message->job);
  if (message->job != credentials_.job) return refuse(Refusal::kJob);

  random_bytes(challenge_);
  const Challenge challenge{Preamble(HandshakeKind::kChallenge), challenge_, credentials_.view,
                            sign(credentials_, "server", hello_bytes_, challenge_, credentials_.view)};
  if (!send_all(codec::encode(challenge))) return State::kRefused;
  step_ = Step::kProof;
  have_ = 0;
  return read_proof();
}

ServerHandshake::State ServerHandshake::read_proof() {
  const Read read = read_up_to(proof_.size());
  if (read != Read::kDone) return read == Read::kMore ? State::kPending : State::kRefused;
  if (!equal_constant_time(proof_, sign(credentials_, "client", hello_bytes_, challenge_, credentials_.view))) {
    return refuse(Refusal::kSecret);
  }
  return send_all(codec::encode(Preamble(HandshakeKind::kWelcome))) ? State::kAccepted : State::kRefused;
}

AuthenticatedSocket ServerHandshake::take() {
  return {std::move(fd_), hello_, sign(credentials_, "session", hello_bytes_, challenge_, credentials_.view),
          credentials_.job};
}

ServerHandshake::State ServerHandshake::refuse(Refusal reason) {
  bool sent = send_all(codec::encode(Preamble(HandshakeKind::kRefusal, reason)));
  if (sent && reason == Refusal::kJob) sent = send_all(codec::encode(seal_name(credentials_, hello_bytes_)));
  if (!sent || ::shutdown(fd_.get(), SHUT_WR) != 0) return State::kRefused;
  step_ = Step::kDrain;
  return drain();
}

ServerHandshake::State ServerHandshake::drain() {
  std::array<std::byte, 1024> rest;
  const auto got = ::recv(fd_.get(), rest.data(), rest.size(), MSG_DONTWAIT);
  const bool still_there = got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
  return still_there ? State::kPending : State::kRefused;
}

// The messages are far smaller than the buffer of a new socket: a socket that does not take them at once is broken.
bool ServerHandshake::send_all(std::span<const std::byte> bytes) {
  return ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace bps::transport
