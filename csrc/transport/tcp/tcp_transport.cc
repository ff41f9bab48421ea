#include "transport/tcp/tcp_transport.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "core/hmac.h"
#include "core/log.h"
#include "transport/control_endpoint.h"
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

std::unique_ptr<Endpoint> TcpTransport::connect(std::span<const std::byte> address, const Hello& hello,
                                                const Deadline& deadline, const std::string& whom) {
  const std::string text(reinterpret_cast<const char*>(address.data()), address.size());
  const std::size_t space = text.find(' ');
  if (space == std::string::npos) {
    throw Error(ErrorCode::kTransport, whom + " published the unusable tcp address '" + text + "'",
                "install the same bps_rdma version everywhere");
  }
  Fd socket =
      connect_tcp(text.substr(0, space), static_cast<std::uint16_t>(std::stoi(text.substr(space + 1))), deadline);
  client_handshake(socket.get(), hello, credentials_, deadline, whom);
  if (hello.plane == Plane::kControl) return std::make_unique<ControlEndpoint>(std::move(socket), hello, counters_);
  tune(socket.get(), congestion_);
  return std::make_unique<TcpData>(std::move(socket), hello, loop_, counters_, *regions_);
}

Endpoint* TcpTransport::accept(std::unique_ptr<IncomingConnection> incoming, Sink& sink) {
  const Hello& hello = incoming->hello;
  Fd fd = std::move(static_cast<IncomingSocket&>(*incoming).socket);
  std::unique_ptr<Endpoint> endpoint;
  if (hello.plane == Plane::kControl) {
    endpoint = std::make_unique<ControlEndpoint>(std::move(fd), hello, counters_);
  } else {
    tune(fd.get(), congestion_);
    endpoint = std::make_unique<TcpData>(std::move(fd), hello, loop_, counters_, *regions_);
  }
  endpoint->sink = &sink;
  return attach(std::move(endpoint));
}

Endpoint* TcpTransport::attach(std::unique_ptr<Endpoint> endpoint) {
  endpoints_.push_back(std::move(endpoint));
  Endpoint* attached = endpoints_.back().get();
  if (attached->is_data_plane) {
    static_cast<TcpData*>(attached)->start();
  } else {
    static_cast<ControlEndpoint*>(attached)->start(loop_);
  }
  return attached;
}

void TcpTransport::close(Endpoint* endpoint) {
  std::erase_if(endpoints_, [&](const auto& owned) { return owned.get() == endpoint; });
}

int TcpTransport::poll() {
  int found = 0;
  for (std::size_t i = 0; i < endpoints_.size(); ++i) {
    if (endpoints_[i]->is_data_plane) found += static_cast<TcpData*>(endpoints_[i].get())->poll();
  }
  return found;
}

bool TcpTransport::arm() {
  return std::all_of(endpoints_.begin(), endpoints_.end(), [](const auto& endpoint) {
    return !endpoint->is_data_plane || static_cast<const TcpData*>(endpoint.get())->idle();
  });
}

}  // namespace bps::transport::tcp
