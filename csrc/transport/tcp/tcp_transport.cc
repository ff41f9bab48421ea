// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/tcp_transport.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
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

void set(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof value);
}

// Makes the system ask a quiet peer. A host that has vanished sends nothing, not even the end of its connections.
void ask_when_quiet(int socket, double quiet_s) {
  constexpr int kQuestions = 3;
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, static_cast<int>(std::ceil(quiet_s)));
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(std::ceil(quiet_s / kQuestions)));
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kQuestions);
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
}

void tune(int socket, const TcpOptions& options) {
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  if (is_loopback(socket)) {
    // There is no distance to fill: bytes that wait in a large buffer have only left the cache when they are read.
    set(socket, SOL_SOCKET, SO_SNDBUF, 128 * 1024);
  } else if (options.quiet_s > 0) {
    ask_when_quiet(socket, options.quiet_s);
  }
  const std::string& congestion = options.congestion;
  if (congestion.empty()) return;
  if (::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, congestion.data(), static_cast<socklen_t>(congestion.size())) !=
      0) {
    log_info("congestion control '" + congestion + "' is not available; the system's default is used");
  }
}

// Returns the addresses that a peer published.
std::vector<TcpAddress> addresses_of(std::span<const std::byte> published, const std::string& whom) {
  const auto found = parse_addresses(as_text(published));
  if (found) return *found;
  throw Error(ErrorCode::kTransport,
              whom + " published the unusable tcp address '" + std::string(as_text(published)) + "'",
              "install the same bps_rdma version everywhere");
}

}  // namespace

TcpTransport::TcpTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, TcpOptions options,
                           std::vector<TcpRail> rails)
    : loop_(loop),
      credentials_(credentials),
      counters_(counters),
      options_(std::move(options)),
      rails_(std::move(rails)),
      regions_(std::make_shared<Regions>()) {}

TcpTransport::~TcpTransport() = default;

RegionPtr TcpTransport::register_memory(std::span<std::byte> bytes) {
  return std::make_shared<TcpRegion>(bytes, regions_);
}

std::size_t TcpTransport::rail_pairs(std::span<const std::byte> address) const {
  const auto theirs = parse_addresses(as_text(address));
  return std::max({std::size_t{1}, rails_.size(), theirs ? theirs->size() : 0});
}

TcpTransport::Opened TcpTransport::open_socket(const ConnectRequest& request, Plane plane) const {
  const std::vector<TcpAddress> theirs = addresses_of(request.address, request.whom);
  Opened opened{{}, {}, rails_of(request.connection, rails_.size(), theirs.size())};
  const TcpAddress& to = theirs[opened.rails.there];
  // With one rail the system finds the way, as it does for every program.
  const std::string from = rails_.size() > 1 ? rails_[opened.rails.here].address : std::string();
  GreetedSocket greeted = connect_and_shake([&] { return connect_tcp(to.host, to.port, request.deadline, from); },
                                            request.hello_for(plane), credentials_, request.deadline, request.whom);
  opened.socket = std::move(greeted.socket);
  opened.key = greeted.session.key;
  opened.rails.speed = rails_.empty() ? to.speed : slower(rails_[opened.rails.here].speed, to.speed);
  if (plane == Plane::kData) tune(opened.socket.get(), options_);
  return opened;
}

std::unique_ptr<ControlEndpoint> TcpTransport::connect_control(const ConnectRequest& request) {
  Opened opened = open_socket(request, Plane::kControl);
  return std::make_unique<SocketControl>(std::move(opened.socket), MessageKeys::of_client(opened.key),
                                         request.hello_for(Plane::kControl), counters_);
}

std::unique_ptr<DataEndpoint> TcpTransport::connect_data(const ConnectRequest& request) {
  Opened opened = open_socket(request, Plane::kData);  // payload carries no authentication code
  auto made =
      std::make_unique<TcpData>(std::move(opened.socket), request.hello_for(Plane::kData), loop_, counters_, *regions_);
  made->rails = opened.rails;
  return made;
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
  tune(socket.get(), options_);
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
