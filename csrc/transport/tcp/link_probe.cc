// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/link_probe.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <vector>

#include "core/error.h"
#include "core/interrupt.h"
#include "transport/listener.h"
#include "transport/tcp/tcp_rails.h"

namespace bps::transport::tcp {
namespace {

// A member that stops in the middle does not keep its socket open for ever.
constexpr double kPatience_s = 30;
constexpr std::size_t kMostProbes = 256;

[[noreturn]] void fail(const ConnectRequest& request) {
  throw Error(ErrorCode::kUnreachable, request.whom + " ended the measurement of the link", "see its log");
}

void await(int fd, short events, const ConnectRequest& request) {
  pollfd wait{fd, events, 0};
  const int ready = poll_until(wait, request.deadline);
  if (ready < 0) throw_errno("cannot wait for " + request.whom);
  if (ready == 0) {
    throw Error(ErrorCode::kTimeout, request.whom + " did not take the bytes that measure the link in time",
                "check that it is running and not stopped");
  }
}

// Returns what a segment and its acknowledgement take on an idle network: no part of the time that bytes take.
double round_trip_s(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return info.tcpi_rtt / 1e6;
}

double measure_round(int fd, const std::vector<std::byte>& bytes, const ConnectRequest& request) {
  const auto begin = Clock::now();
  for (std::size_t sent = 0; sent < bytes.size();) {
    const auto n = ::send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      sent += static_cast<std::size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      await(fd, POLLOUT, request);
    } else if (errno != EINTR) {
      fail(request);
    }
  }
  await(fd, POLLIN, request);
  char confirmed = 0;
  if (::recv(fd, &confirmed, 1, MSG_DONTWAIT) != 1) fail(request);
  const double took_s = std::chrono::duration<double>(Clock::now() - begin).count();
  return static_cast<double>(bytes.size()) / std::max(took_s - round_trip_s(fd), 1e-6);
}

}  // namespace

double measure_link(const ConnectRequest& request, const Credentials& credentials) {
  const auto rails = parse_addresses(as_text(request.address));
  if (!rails) throw Error(ErrorCode::kInternal, request.whom + " published no address", "report this as a bug");
  const Fd socket = connect_tcp(rails->front().host, rails->front().port, request.deadline);
  Hello hello = request.hello;
  hello.plane = Plane::kProbe;
  (void)client_handshake(socket.get(), hello, credentials, request.deadline, request.whom);
  const std::vector<std::byte> bytes(kProbeBytes);
  double best = 0;
  for (int i = 0; i < kProbeRounds; ++i) best = std::max(best, measure_round(socket.get(), bytes, request));
  return best;
}

void ProbeSink::take(AuthenticatedSocket&& accepted) {
  if (probes_.size() >= kMostProbes) return;
  const auto probe = probes_.insert(probes_.end(), {.socket = std::move(accepted.socket)});
  probe->expiry = loop_.after(kPatience_s, [this, probe] { end(probe); });
  loop_.watch(probe->socket.get(), EPOLLIN, [this, probe](std::uint32_t) { read(probe); });
}

void ProbeSink::read(Position probe) {
  static std::byte thrown_away[64 << 10];
  const std::size_t round_left = kProbeBytes - probe->received % kProbeBytes;
  const auto n = ::recv(probe->socket.get(), thrown_away, std::min(sizeof thrown_away, round_left), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (n <= 0) return end(probe);
  probe->received += static_cast<std::size_t>(n);
  if (probe->received % kProbeBytes != 0) return;
  const char confirmed = 1;
  const bool told = ::send(probe->socket.get(), &confirmed, 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
  if (!told || probe->received >= kProbeBytes * kProbeRounds) end(probe);
}

void ProbeSink::end(Position probe) {
  loop_.forget(probe->socket.get());
  probes_.erase(probe);
}

void ProbeSink::close() {
  while (!probes_.empty()) end(probes_.begin());
}

}  // namespace bps::transport::tcp
