// SPDX-License-Identifier: Apache-2.0
#include "van/find_scheduler.h"

#include <algorithm>
#include <optional>

#include "core/interrupt.h"
#include "transport/listener.h"

namespace bps::van {
namespace {

// A port that drops packets, or a program that never answers, must not delay the ports after it for long.
constexpr double kConnectSeconds = 1;
constexpr double kHandshakeSeconds = 3;
constexpr double kLongestPauseSeconds = 0.2;

// How informative an error is: a refusal by our scheduler, then one by another job's, then a closed port.
int informative(const Error& error) {
  const auto* handshake = dynamic_cast<const transport::HandshakeError*>(&error);
  if (handshake == nullptr) return 0;
  switch (handshake->refusal()) {
    case transport::Refusal::kVersion:
    case transport::Refusal::kSecret: return 3;
    case transport::Refusal::kJob: return 2;
    case transport::Refusal::kSilent: break;
  }
  return 1;
}

Deadline sooner(const Deadline& deadline, double seconds) {
  return Deadline::after(std::min(seconds, deadline.left_ms() / 1e3));
}

}  // namespace

FoundScheduler find_scheduler(const std::string& host, const std::vector<std::uint16_t>& ports,
                              const transport::Credentials& credentials, const Deadline& deadline) {
  if (ports.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no port at which to look for the scheduler",
                "set DMLC_PS_ROOT_PORT");
  }
  const std::string shown = host.find(':') == std::string::npos ? host : "[" + host + "]";  // IPv6
  std::optional<Error> best;
  int best_rank = -1;
  double pause_s = 0.01;
  for (;;) {
    for (const std::uint16_t port : ports) {
      const std::string where = shown + ":" + std::to_string(port);
      try {
        Fd socket = transport::connect_tcp(host, port, sooner(deadline, kConnectSeconds));
        const transport::Session session =
            transport::client_handshake(socket.get(), {.plane = transport::Plane::kVan}, credentials,
                                        sooner(deadline, kHandshakeSeconds), "the scheduler at " + where);
        return {std::move(socket), session, where};
      } catch (const Error& error) {
        if (error.code() == ErrorCode::kTransport) throw;  // this process cannot open a socket, now or later
        const int rank = informative(error);
        if (rank == 3 && ports.size() == 1) throw;
        if (rank >= best_rank) best = error;
        best_rank = std::max(rank, best_rank);
      }
      if (deadline.passed()) break;
    }
    if (deadline.passed()) break;
    sleep_until(sooner(deadline, pause_s));
    pause_s = std::min(pause_s * 2, kLongestPauseSeconds);
  }
  if (best_rank > 1) throw *best;
  std::string where = shown + (ports.size() == 1 ? ":" : ", ports ");
  for (std::size_t i = 0; i < ports.size(); ++i) where += (i > 0 ? ", " : "") + std::to_string(ports[i]);
  throw Error(ErrorCode::kUnreachable, "no scheduler answers at " + where + " (" + best->what() + ")",
              "start the scheduler first, or check DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT");
}

}  // namespace bps::van
