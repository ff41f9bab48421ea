// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/tcp_transport.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "core/hmac.h"
#include "core/log.h"
#include "transport/listener.h"
#include "transport/tcp/tcp_data.h"

namespace bps::transport::tcp {
namespace {

class TcpRegion final : public Region {
 public:
  TcpRegion(std::span<std::byte> bytes, std::shared_ptr<TcpTransport::Regions> regions)
      : Region(bytes), regions_(std::move(regions)) {
    do {
      random_bytes(std::as_writable_bytes(std::span(&key_, 1)));
    } while (key_ == 0 || regions_->contains(key_));
    (*regions_)[key_] = bytes;
  }
  ~TcpRegion() override { regions_->erase(key_); }

 private:
  std::shared_ptr<TcpTransport::Regions> regions_;
};

bool is_loopback(int socket) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_size = sizeof here;
  socklen_t there_size = sizeof there;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&here), &here_size) != 0 ||
      ::getpeername(socket, reinterpret_cast<sockaddr*>(&there), &there_size) != 0 ||
      here.ss_family != there.ss_family) {
    return false;
  }
  if (here.ss_family == AF_INET) {
    return reinterpret_cast<sockaddr_in&>(here).sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in&>(there).sin_addr.s_addr;
  }
  return std::memcmp(&reinterpret_cast<sockaddr_in6&>(here).sin6_addr,
                     &reinterpret_cast<sockaddr_in6&>(there).sin6_addr, sizeof(in6_addr)) == 0;
}

void tune(int socket, const std::string& congestion) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (is_loopback(socket)) {
    // No distance, so nothing to fill: bytes that wait in a large buffer have only left the cache when they are read.
    const int small = 128 * 1024;
    ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
  }
  if (congestion.empty()) return;
  if (::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, congestion.data(), static_cast<socklen_t>(congestion.size())) !=
      0) {
    log_info("congestion control '" + congestion + "' is not available; the system's default is used");
  }
}

}  // namespace

TcpTransport::TcpTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, std::string congestion)
    : loop_(loop),
      credentials_(credentials),
      counters_(counters),
      congestion_(std::move(congestion)),
      regions_(std::make_shared<Regions>()) {}

TcpTransport::~TcpTransport() = default;

std::string TcpTransport::make_address(const std::string& host, std::uint16_t port) {
  return host + " " + std::to_string(port);
}

RegionPtr TcpTransport::register_memory(std::span<std::byte> bytes) {
  return std::make_shared<TcpRegion>(bytes, regions_);
}

// `key` is set to that of the connection.
Fd TcpTransport::open_socket(const ConnectRequest& request, Plane plane, Digest& key) const {
  const std::string text(as_text(request.address));
  const std::size_t space = text.find(' ');
  if (space == std::string::npos) {
    throw Error(ErrorCode::kTransport, request.whom + " published the unusable tcp address '" + text + "'",
                "install the same bps_rdma version everywhere");
  }
  const auto port = static_cast<std::uint16_t>(std::stoi(text.substr(space + 1)));
  Fd socket = connect_tcp(text.substr(0, space), port, request.deadline);
  key = client_handshake(socket.get(), request.hello_for(plane), credentials_, request.deadline, request.whom).key;
  if (plane == Plane::kData) tune(socket.get(), congestion_);
  return socket;
}

std::unique_ptr<ControlEndpoint> TcpTransport::connect_control(const ConnectRequest& request) {
  Digest key{};
  Fd socket = open_socket(request, Plane::kControl, key);
  return std::make_unique<SocketControl>(std::move(socket), MessageKeys::of_client(key),
                                         request.hello_for(Plane::kControl), counters_);
}

std::unique_ptr<DataEndpoint> TcpTransport::connect_data(const ConnectRequest& request) {
  Digest unused{};  // payload carries no authentication code
  return std::make_unique<TcpData>(open_socket(request, Plane::kData, unused), request.hello_for(Plane::kData), loop_,
                                   counters_, *regions_);
}

ControlEndpoint* TcpTransport::attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) {
  endpoint->sink = &sink;
  controls_.emplace_back(static_cast<SocketControl*>(endpoint.release()));
  controls_.back()->start(loop_);
  return controls_.back().get();
}

DataEndpoint* TcpTransport::attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) {
  endpoint->sink = &sink;
  datas_.emplace_back(static_cast<TcpData*>(endpoint.release()));
  datas_.back()->start();
  return datas_.back().get();
}

ControlEndpoint* TcpTransport::accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) {
  auto& accepted = static_cast<IncomingSocket&>(*incoming);
  return attach(std::make_unique<SocketControl>(std::move(accepted.socket), MessageKeys::of_server(accepted.key),
                                                incoming->hello, counters_),
                sink);
}

DataEndpoint* TcpTransport::accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) {
  Fd socket = std::move(static_cast<IncomingSocket&>(*incoming).socket);
  tune(socket.get(), congestion_);
  return attach(std::make_unique<TcpData>(std::move(socket), incoming->hello, loop_, counters_, *regions_), sink);
}

void TcpTransport::close(Endpoint* endpoint) {
  std::erase_if(controls_, [&](const auto& owned) { return owned.get() == endpoint; });
  std::erase_if(datas_, [&](const auto& owned) { return owned.get() == endpoint; });
}

int TcpTransport::poll() {
  int found = 0;
  for (std::size_t i = 0; i < datas_.size(); ++i) found += datas_[i]->poll();
  return found;
}

bool TcpTransport::arm() {
  return std::ranges::all_of(datas_, [](const auto& data) { return data->idle(); });
}

}  // namespace bps::transport::tcp
