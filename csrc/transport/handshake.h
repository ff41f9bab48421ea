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
#include "core/fd.h"

namespace bps {

inline constexpr std::uint16_t kProtocolVersion = 1;

// What members of one job share. `job` tells jobs on one host apart, `secret` keeps strangers out.
struct Credentials {
  std::array<std::byte, 16> job{};
  Bytes secret;

  // job = first half of SHA-256(name); the secret's bytes are used as given.
  static Credentials from(std::string_view job_name, std::string_view secret);
};

enum class Plane : std::uint8_t { kVan = 0, kControl = 1, kData = 2 };

// Who is calling, and which of the callee's loops it wants to reach.
struct Hello {
  std::uint32_t node = 0;   // the caller's van id; 0 while it has none
  std::uint16_t lane = 0;   // the caller's loop
  std::uint16_t shard = 0;  // the callee's loop
  Plane plane = Plane::kVan;
};

// The calling side; blocks up to `deadline`. Throws Error: kVersion, kAuthentication (wrong secret, or the other side
// serves another job), kUnreachable (closed or silent); `whom` names the other side in the message.
void greet(int fd, const Hello& hello, const Credentials& credentials, const Deadline& deadline,
           const std::string& whom);

// The called side, without blocking: call advance() whenever the descriptor is readable.
class Greeter {
 public:
  enum class State : std::uint8_t { kPending, kAccepted, kRefused };

  Greeter(Fd fd, const Credentials& credentials);
  State advance();
  int fd() const { return fd_.get(); }
  const Hello& hello() const { return hello_; }
  Fd take() { return std::move(fd_); }  // once accepted

 private:
  void refuse(std::uint8_t reason);
  bool read_exactly(std::size_t size);

  Fd fd_;
  const Credentials& credentials_;
  Hello hello_;
  std::array<std::byte, 128> buffer_{};
  std::size_t have_ = 0;
  std::array<std::byte, 128> transcript_{};
  std::array<std::byte, 16> challenge_{};
  State state_ = State::kPending;
  bool challenged_ = false;
};

}  // namespace bps
