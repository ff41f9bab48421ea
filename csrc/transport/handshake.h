// SPDX-License-Identifier: Apache-2.0
// Defines the hello that opens every connection: versioned, bound to one job, and authenticated by a shared secret.
//
//   client -> Hello      magic, version, plane, node and loops, job, 16 random bytes
//   server -> Challenge  16 random bytes, view, HMAC(key, "server" | hello | random | view)
//             or Refusal with the reason, and with the name of its job where the client is of another one (job_name.h)
//   client -> Proof      HMAC(key, "client" | hello | random | view)
//   server -> Welcome, or Refusal
//
// Both sides prove that they know the key, which never travels. Both derive the key of this connection from it:
// HMAC(key, "session" | hello | random | view). The messages are in handshake_messages.h; all have fixed sizes.
//
// The view says which run of a job this is: the scheduler chooses it and tells it in its challenges. On the other
// planes it is part of the job (Credentials::of), so that a process of an earlier run is a member of another job there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "core/bytes.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/fd.h"
#include "core/hmac.h"

namespace bps::transport {

// This is the version of everything that the processes of a job send to each other.
inline constexpr std::uint16_t kProtocolVersion = 21;

using JobId = std::array<std::byte, 16>;

// Names the run of a job, and which of its memberships counts.
struct ViewId {
  std::uint64_t incarnation = 0;  // a random number of the scheduler; 0: none is known
  std::uint32_t epoch = 1;
  static constexpr void fields(auto& io, auto& m) { io(m.incarnation, m.epoch); }
  bool operator==(const ViewId&) const = default;
};

// All members of a job know these: `job` distinguishes jobs, `key` authenticates their members.
struct Credentials {
  JobId job{};
  Digest key{};
  ViewId view{};  // clients are told; empty for all but the scheduler
  // `name` is the name of the job, for people who look for the wrong scheduler; `names` is the key that encrypts it.
  std::string name{};
  Digest names{};

  // The job is the first half of SHA-256(name). The key is HMAC(secret, name): jobs of one secret have different keys.
  static Credentials from(std::string_view job_name, std::string_view secret);
  // Makes those for connections within this view: the job is the first half of HMAC(key, job | view).
  Credentials of(const ViewId& view) const;
};

enum class Plane : std::uint8_t { kVan = 0, kControl = 1, kData = 2, kProbe = 3 };  // the last: tcp/link_probe.h
constexpr bool is_valid(Plane plane) {
  return plane <= Plane::kProbe;
}

// The client sends this first: who asks for the connection, and which loop of the server it wants to reach.
struct Hello {
  std::uint32_t node = 0;         // the client's van id; 0 while it has none
  std::uint16_t client_loop = 0;  // the loop of the client that asks
  std::uint16_t server_loop = 0;  // the loop of the server that it wants to reach
  Plane plane = Plane::kVan;      // travels in the preamble
  // `path` is the path of the two loops that the connection belongs to; 0 where there is only one, whose loss is not
  // survived (control_paths.h). `stream` is the connection's number among the data connections of the path.
  std::uint16_t path = 0;
  std::uint16_t stream = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.node, m.client_loop, m.server_loop); }
};

// A refusal says why a handshake failed; the numbers of the first three are part of the protocol.
enum class Refusal : std::uint8_t {
  kVersion = 1,
  kJob = 2,  // the other side belongs to another job
  kSecret = 3,
  kSilent = 4,  // the other side closed the connection, sent nothing, or does not speak this protocol
};

class HandshakeError : public Error {
 public:
  HandshakeError(Refusal refusal, ErrorCode code, const std::string& what, std::string hint, bool is_foreign = false)
      : Error(code, what, std::move(hint)), refusal_(refusal), is_foreign_(is_foreign) {}
  Refusal refusal() const { return refusal_; }
  // Returns true when another program listens there.
  bool is_foreign() const { return is_foreign_; }

 private:
  Refusal refusal_;
  bool is_foreign_;
};

// Throws the HandshakeError of a client that a server of protocol `version` has refused.
[[noreturn]] void throw_refused(Refusal refusal, std::uint16_t version, const std::string& whom);
// Throws the HandshakeError of a client whose server did not prove that it knows the secret.
[[noreturn]] void throw_secret(const std::string& whom);

// Holds the outcome of a handshake.
struct Session {
  Digest key{};   // that of this connection alone
  ViewId view{};  // that of the server
};

// Runs the client's side, and blocks up to `deadline`. Throws HandshakeError with kVersion, with kAuthentication (wrong
// secret, or a server of another job), or with kUnreachable (closed or silent). `whom` names the server in the message.
Session client_handshake(int fd, const Hello& hello, const Credentials& credentials, const Deadline& deadline,
                         const std::string& whom);

// Does the same on a socket that `connect` makes. A server gives up a client that is silent for two seconds. A client
// that was stopped for so long meanwhile connects again, as long as its deadline allows it.
struct GreetedSocket {
  Fd socket;
  Session session;
};
GreetedSocket connect_and_shake(const std::function<Fd()>& connect, const Hello& hello, const Credentials& credentials,
                                const Deadline& deadline, const std::string& whom);

// Holds the connection of a client that has proved to belong to the job.
struct AuthenticatedSocket {
  Fd socket;
  Hello hello;
  Digest key;  // that of this connection
  JobId job{};
};

// Returns what a server with clients of several jobs expects of a client of this job. A client of none of them gets
// credentials that nobody can have. It is refused in the same way as a client with a wrong secret.
using CredentialsOf = std::function<Credentials(const JobId&)>;

// Runs the server's side without blocking: call advance() whenever the descriptor is readable. A refused client stays
// pending until it closes the connection, because closing a socket with unread bytes discards the reason that is on its
// way. The owner bounds how long that may take.
class ServerHandshake {
 public:
  enum class State : std::uint8_t { kPending, kAccepted, kRefused };

  ServerHandshake(Fd fd, const Credentials& credentials, CredentialsOf choose = nullptr);
  State advance();
  int fd() const { return fd_.get(); }
  const Hello& hello() const { return hello_; }
  bool has_heard() const { return have_ > 0 || step_ != Step::kHello; }  // the first byte has come
  AuthenticatedSocket take();                                            // to be called once accepted

 private:
  enum class Step : std::uint8_t { kHello, kProof, kDrain };
  enum class Read : std::uint8_t { kDone, kMore, kClosed };

  Read read_up_to(std::size_t size);
  State read_hello();
  State read_proof();
  State refuse(Refusal reason);
  State drain();
  bool send_all(std::span<const std::byte> bytes);

  Fd fd_;
  Credentials credentials_;  // set when the client came, or when it said of which job it is
  const CredentialsOf choose_;
  Hello hello_;
  std::array<std::byte, 52> hello_bytes_{};
  std::array<std::byte, 32> proof_{};
  std::array<std::byte, 16> challenge_{};
  std::size_t have_ = 0;
  Step step_ = Step::kHello;
};

}  // namespace bps::transport
