#include "transport/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/hmac.h"

namespace bps::transport {
namespace {

// The layouts. The first eight bytes of every message are the same in all versions of the protocol, so that two
// versions can tell each other apart.
constexpr std::uint32_t kMagic = 0x52'53'50'42;  // "BPSR"
constexpr std::size_t kHeaderSize = 8;           // magic, version, kind, detail
constexpr std::size_t kNonceSize = 16;
constexpr std::size_t kMacSize = 32;
constexpr std::size_t kHelloSize = kHeaderSize + 8 + 16 + kNonceSize;  // node, worker_loop, server_loop, job, nonce

enum Kind : std::uint8_t { kHello = 1, kChallenge = 2, kWelcome = 3, kRefusal = 4 };

using Mac = std::array<std::byte, kMacSize>;

struct Header {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint8_t kind;
  std::uint8_t detail;  // the plane of a hello, the reason of a refusal
};
static_assert(sizeof(Header) == kHeaderSize);

void put_header(Writer& out, Kind kind, std::uint8_t detail) {
  out.put(kMagic).put(kProtocolVersion).put(static_cast<std::uint8_t>(kind)).put(detail);
}

Header get_header(std::span<const std::byte> bytes) {
  Reader in(bytes);
  Header header{};
  header.magic = in.get<std::uint32_t>();
  header.version = in.get<std::uint16_t>();
  header.kind = in.get<std::uint8_t>();
  header.detail = in.get<std::uint8_t>();
  return header;
}

// Both sides sign everything that either of them said, each under its own label: a proof can neither be replayed nor
// sent back to the one who made it.
Mac sign(const Credentials& credentials, std::string_view label, std::span<const std::byte> hello,
         std::span<const std::byte> challenge) {
  Writer out;
  out.put_raw(as_bytes(label)).put_raw(hello).put_raw(challenge);
  return hmac_sha256(credentials.secret, out.take());
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

void await(int fd, short events, const Deadline& deadline, const std::string& whom) {
  pollfd wait{fd, events, 0};
  for (;;) {
    const int ready = ::poll(&wait, 1, deadline.left_ms());
    if (ready > 0) return;
    if (ready == 0) fail(whom + " did not answer the hello in time", "check that it is running and not stopped");
    if (errno != EINTR) throw_errno("cannot wait for " + whom);
  }
}

[[noreturn]] void fail_closed(const std::string& whom) {
  fail(whom + " closed the connection during the hello", "see its log, and try again");
}

void send_bytes(int fd, std::span<const std::byte> bytes, const Deadline& deadline, const std::string& whom) {
  while (!bytes.empty()) {
    const auto sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      await(fd, POLLOUT, deadline, whom);
    } else if (errno != EINTR) {
      return;  // closed: what the other side said before is still to be read, and says more than this error
    }
  }
}

void receive_bytes(int fd, std::span<std::byte> bytes, const Deadline& deadline, const std::string& whom) {
  while (!bytes.empty()) {
    const auto got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      await(fd, POLLIN, deadline, whom);
    } else if (got == 0 || errno != EINTR) {
      fail_closed(whom);
    }
  }
}

// Reads a header that has to be of `kind`.
void receive_header(int fd, Kind kind, const Deadline& deadline, const std::string& whom) {
  std::array<std::byte, kHeaderSize> bytes{};
  receive_bytes(fd, bytes, deadline, whom);
  const Header header = get_header(bytes);
  if (header.magic != kMagic) {
    fail(whom + " does not speak the protocol of bps_rdma", "another program listens there: choose another port");
  }
  if (header.kind == kRefusal) throw_refused(Refusal{header.detail}, header.version, whom);
  if (header.version != kProtocolVersion) fail_version(whom, header.version);
  if (header.kind != kind) fail(whom + " sent an unexpected message", "install the same bps_rdma version everywhere");
}

}  // namespace

void throw_secret(const std::string& whom) {
  throw HandshakeError(Refusal::kSecret, ErrorCode::kAuthentication, whom + " has another secret",
                       "set the same BPS_SECRET on every node");
}

void throw_refused(Refusal refusal, std::uint16_t version, const std::string& whom) {
  switch (refusal) {
    case Refusal::kVersion: fail_version(whom, version);
    case Refusal::kSecret: throw_secret(whom);
    case Refusal::kJob:
      throw HandshakeError(Refusal::kJob, ErrorCode::kAuthentication, whom + " belongs to another job",
                           "set the same BPS_JOB_ID on every node of a job, and give each job a port of its own");
    case Refusal::kSilent: break;
  }
  fail(whom + " refused the connection", "see its log");
}

Credentials Credentials::from(std::string_view job_name, std::string_view secret) {
  Credentials credentials;
  const auto digest = sha256(as_bytes(job_name));
  std::copy_n(digest.begin(), credentials.job.size(), credentials.job.begin());
  const auto bytes = as_bytes(secret);
  credentials.secret.assign(bytes.begin(), bytes.end());
  return credentials;
}

void client_handshake(int fd, const Hello& hello, const Credentials& credentials, const Deadline& deadline,
                      const std::string& whom) {
  std::array<std::byte, kNonceSize> nonce{};
  random_bytes(nonce);
  Writer out;
  put_header(out, kHello, static_cast<std::uint8_t>(hello.plane));
  out.put(hello.node).put(hello.client_loop).put(hello.server_loop).put_raw(credentials.job).put_raw(nonce);
  const Bytes said = out.take();
  send_bytes(fd, said, deadline, whom);

  receive_header(fd, kChallenge, deadline, whom);
  std::array<std::byte, kNonceSize> challenge{};
  Mac mac{};
  receive_bytes(fd, challenge, deadline, whom);
  receive_bytes(fd, mac, deadline, whom);
  if (!equal_constant_time(mac, sign(credentials, "server", said, challenge))) throw_secret(whom);

  send_bytes(fd, sign(credentials, "client", said, challenge), deadline, whom);
  receive_header(fd, kWelcome, deadline, whom);
}

ServerHandshake::ServerHandshake(Fd fd, const Credentials& credentials)
    : fd_(std::move(fd)), credentials_(credentials) {
  static_assert(kHelloSize == std::tuple_size_v<decltype(hello_bytes_)>);
}

ServerHandshake::State ServerHandshake::advance() {
  if (step_ == Step::kHello) return read_hello();
  if (step_ == Step::kProof) return read_proof();
  return drain();
}

// Never reads beyond `size`: what follows belongs to the protocol that comes after the hello.
ServerHandshake::Read ServerHandshake::read_up_to(std::size_t size) {
  std::byte* buffer = step_ == Step::kHello ? hello_bytes_.data() : proof_.data();
  while (have_ < size) {
    const auto got = ::recv(fd_.get(), buffer + have_, size - have_, MSG_DONTWAIT);
    if (got > 0) {
      have_ += static_cast<std::size_t>(got);
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return Read::kMore;
    } else if (got == 0 || errno != EINTR) {
      return Read::kClosed;
    }
  }
  return Read::kDone;
}

ServerHandshake::State ServerHandshake::read_hello() {
  // The version is judged as soon as it is there: a hello of another version may have another length.
  for (const std::size_t wanted : {kHeaderSize, kHelloSize}) {
    const Read read = read_up_to(wanted);
    if (read != Read::kDone) return read == Read::kMore ? State::kPending : State::kRefused;
    const Header header = get_header(hello_bytes_);
    if (header.magic != kMagic || header.kind != kHello) return State::kRefused;  // no answer to unauthenticated peers
    if (header.version != kProtocolVersion) return refuse(Refusal::kVersion);
    if (header.detail > static_cast<std::uint8_t>(Plane::kData)) return State::kRefused;
    hello_.plane = Plane{header.detail};
  }
  Reader in(std::span<const std::byte>(hello_bytes_).subspan(kHeaderSize));
  hello_.node = in.get<std::uint32_t>();
  hello_.client_loop = in.get<std::uint16_t>();
  hello_.server_loop = in.get<std::uint16_t>();
  if (!std::ranges::equal(in.get_raw(credentials_.job.size()), credentials_.job)) return refuse(Refusal::kJob);

  random_bytes(challenge_);
  Writer out;
  put_header(out, kChallenge, 0);
  out.put_raw(challenge_).put_raw(sign(credentials_, "server", hello_bytes_, challenge_));
  if (!send_all(out.take())) return State::kRefused;
  step_ = Step::kProof;
  have_ = 0;
  return read_proof();
}

ServerHandshake::State ServerHandshake::read_proof() {
  const Read read = read_up_to(proof_.size());
  if (read != Read::kDone) return read == Read::kMore ? State::kPending : State::kRefused;
  if (!equal_constant_time(proof_, sign(credentials_, "client", hello_bytes_, challenge_))) {
    return refuse(Refusal::kSecret);
  }
  Writer out;
  put_header(out, kWelcome, 0);
  return send_all(out.take()) ? State::kAccepted : State::kRefused;
}

ServerHandshake::State ServerHandshake::refuse(Refusal reason) {
  Writer out;
  put_header(out, kRefusal, static_cast<std::uint8_t>(reason));
  if (!send_all(out.take()) || ::shutdown(fd_.get(), SHUT_WR) != 0) return State::kRefused;
  step_ = Step::kDrain;
  return drain();
}

ServerHandshake::State ServerHandshake::drain() {
  std::array<std::byte, 1024> rest;
  const auto got = ::recv(fd_.get(), rest.data(), rest.size(), MSG_DONTWAIT);
  const bool still_there = got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
  return still_there ? State::kPending : State::kRefused;
}

// The answers are far smaller than the buffer of a fresh socket: one that does not take them at once is broken.
bool ServerHandshake::send_all(std::span<const std::byte> bytes) {
  return ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace bps::transport
