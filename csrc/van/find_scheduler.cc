// SPDX-License-Identifier: Apache-2.0
#include "van/find_scheduler.h"

#include <algorithm>
#include <optional>

#include "core/interrupt.h"
#include "core/log.h"
#include "transport/listener.h"

namespace bps::van {
namespace {

// A port that drops packets, or a program that never answers, must not delay the ports after it for long.
constexpr double kConnectSeconds = 1;
constexpr double kHandshakeSeconds = 3;
constexpr double kLongestPauseSeconds = 0.2;
// The scheduler of the job before may be about to end, and this job's to start.
constexpr auto kOthersTime = std::chrono::seconds(5);
constexpr double kRivalSeconds = 0.5;  // to answer, on the same host

// Orders errors by how much they tell: a refusal by our scheduler, then what else listens there, then a closed port.
enum class Found : std::uint8_t { kNobody, kSilence, kOther, kOurs };

Found found_by(const Error& error) {
  const auto* handshake = dynamic_cast<const transport::HandshakeError*>(&error);
  if (handshake == nullptr) return Found::kNobody;
  switch (handshake->refusal()) {
    case transport::Refusal::kVersion:
    case transport::Refusal::kSecret: return Found::kOurs;
    case transport::Refusal::kJob: return Found::kOther;
    case transport::Refusal::kSilent: break;
  }
  return handshake->is_foreign() ? Found::kOther : Found::kSilence;
}

Deadline sooner(const Deadline& deadline, double seconds) {
  return Deadline::after(std::min(seconds, deadline.left_ms() / 1e3));
}

std::string with_port(const std::string& host, std::uint16_t port) {
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);  // IPv6
}

FoundScheduler connect(const std::string& host, std::uint16_t port, const transport::Credentials& credentials,
                       const Deadline& deadline) {
  const std::string where = with_port(host, port);
  Fd socket = transport::connect_tcp(host, port, sooner(deadline, kConnectSeconds));
  const transport::Session session =
      transport::client_handshake(socket.get(), {.plane = transport::Plane::kVan}, credentials,
                                  sooner(deadline, kHandshakeSeconds), "the scheduler at " + where);
  return {std::move(socket), session, where};
}

// Keeps the tries at all ports, and what they have shown so far.
class Tries {
 public:
  explicit Tries(bool one_port) : one_port_(one_port) {}

  // Throws an error that will not change.
  void note(const Error& error) {
    if (error.code() == ErrorCode::kTransport) throw Error(error);  // this process cannot open a socket, now or later
    const Found found = found_by(error);
    if (one_port_ && found == Found::kOurs) throw Error(error);
    if (found >= best_) error_ = error;
    best_ = std::max(found, best_);
    if (found != Found::kOther && dynamic_cast<const transport::UnresolvedError*>(&error) == nullptr) return;
    const auto now = Clock::now();
    if (!first_other_) first_other_ = now;
    // Other programs may listen at some of several ports.
    if (!warned_ && (one_port_ || now - *first_other_ > kOthersTime)) {
      warned_ = true;
      log_warning(std::string(error.what()) + "; this process goes on looking for BPS_JOIN_TIMEOUT");
    }
    if (one_port_ && found == Found::kOther && now - *first_other_ > kOthersTime) throw Error(error);
  }

  Found best() const { return best_; }
  const Error& error() const { return *error_; }

 private:
  const bool one_port_;
  Found best_ = Found::kNobody;
  std::optional<Error> error_;
  std::optional<Clock::time_point> first_other_;
  bool warned_ = false;
};

}  // namespace

FoundScheduler find_scheduler(const std::string& host, const std::vector<std::uint16_t>& ports,
                              const transport::Credentials& credentials, const Deadline& deadline,
                              const std::string& hint) {
  if (ports.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no port at which to look for the scheduler",
                "set BPS_ROOT_PORT");
  }
  Tries tries(ports.size() == 1);
  double pause_s = 0.01;
  for (;;) {
    for (const std::uint16_t port : ports) {
      try {
        return connect(host, port, credentials, deadline);
      } catch (const Error& error) {
        tries.note(error);
      }
      if (deadline.passed()) break;
    }
    if (deadline.passed()) break;
    sleep_until(sooner(deadline, pause_s));
    pause_s = std::min(pause_s * 2, kLongestPauseSeconds);
  }
  if (tries.best() > Found::kSilence) throw Error(tries.error());
  const std::string where =
      ports.size() == 1 ? with_port(host, ports.front()) : host + ", " + std::to_string(ports.size()) + " ports";
  throw Error(ErrorCode::kUnreachable, "no scheduler answers at " + where + " (" + tries.error().what() + ")",
              !hint.empty() ? hint : "start the scheduler first, or check BPS_ROOT_URI and BPS_ROOT_PORT");
}

std::string find_rival(const std::vector<std::uint16_t>& ports, const transport::Credentials& credentials) {
  for (const std::uint16_t port : ports) {
    if (port == 0) continue;
    try {
      return connect("127.0.0.1", port, credentials, Deadline::after(kRivalSeconds)).where;
    } catch (const Error&) {  // there is none, or it belongs to another job
    }
  }
  return "";
}

}  // namespace bps::van
