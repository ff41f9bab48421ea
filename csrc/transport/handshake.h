// The hello that opens every connection: versioned, bound to one job, and authenticated by a shared secret.
//
//   client -> Hello      magic, version, job, who is calling and for which plane, 16 random bytes
//   server -> Challenge  16 random bytes, HMAC(secret, "server" | hello | random)     or  Refusal with the reason
//   client -> Proof      HMAC(secret, "client" | hello | random)
//   server -> Welcome                                                                 or  Refusal
//
// Both sides prove that they know the secret; it never travels. All messages have fixed sizes, so nothing from an
// unauthenticated peer is ever used as a length.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/bytes.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/fd.h"

namespace bps::transport {

inline constexpr std::uint16_t kProtocolVersion = 1;

// What members of one job share. `job` tells jobs on one host apart, `secret` keeps unauthenticated peers out.
struct Credentials {
  std::array<std::byte, 16> job{};
  Bytes secret;

  // job = first half of SHA-256(name); the secret's bytes are used as given.
  static Credentials from(std::string_view job_name, std::string_view secret);
};

enum class Plane : std::uint8_t { kVan = 0, kControl = 1, kData = 2 };

// Who is calling, and which of the callee's loops it wants to reach.
struct Hello {
  std::uint32_t node = 0;         // the caller's van id; 0 while it has none
  std::uint16_t client_loop = 0;  // the caller's loop
  std::uint16_t server_loop = 0;  // the callee's loop
  Plane plane = Plane::kVan;
};

// Why a hello failed; the numbers of the first three are part of the protocol.
enum class Refusal : std::uint8_t {
  kVersion = 1,
  kJob = 2,  // the other side serves another job
  kSecret = 3,
  kSilent = 4,  // closed, silent, or not one of us
};

class HandshakeError : public Error {
 public:
  HandshakeError(Refusal refusal, ErrorCode code, const std::string& what, std::string hint)
      : Error(code, what, std::move(hint)), refusal_(refusal) {}
  Refusal refusal() const { return refusal_; }

 private:
  Refusal refusal_;
};

// What the calling side throws when it is told of a refusal by a peer of protocol `version`.
[[noreturn]] void throw_refused(Refusal refusal, std::uint16_t version, const std::string& whom);
// What it throws when the other side does not prove that it knows the secret.
[[noreturn]] void throw_secret(const std::string& whom);

// The calling side; blocks up to `deadline`. Throws HandshakeError: kVersion, kAuthentication (wrong secret, or the
// other side serves another job), kUnreachable (closed or silent); `whom` names the other side in the message.
void client_handshake(int fd, const Hello& hello, const Credentials& credentials, const Deadline& deadline,
                      const std::string& whom);

// The called side, without blocking: call advance() whenever the descriptor is readable. A caller that is refused stays
// pending until it has hung up, because closing on unread bytes would destroy the reason on its way; the owner bounds
// how long that may take.
class ServerHandshake {
 public:
  enum class State : std::uint8_t { kPending, kAccepted, kRefused };

  ServerHandshake(Fd fd, const Credentials& credentials);
  State advance();
  int fd() const { return fd_.get(); }
  const Hello& hello() const { return hello_; }
  Fd take() { return std::move(fd_); }  // once accepted

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
  const Credentials& credentials_;
  Hello hello_;
  std::array<std::byte, 48> hello_bytes_{};
  std::array<std::byte, 32> proof_{};
  std::array<std::byte, 16> challenge_{};
  std::size_t have_ = 0;
  Step step_ = Step::kHello;
};

}  // namespace bps::transport
