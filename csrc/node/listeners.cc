// SPDX-License-Identifier: Apache-2.0
#include "node/listeners.h"

#include <unistd.h>

#include <array>

#include "core/hmac.h"
#include "core/log.h"
#include "node/local_address.h"
#include "transport/shm/shared_memory.h"

namespace bps::node {
namespace {

using transport::Kind;

std::string random_name() {
  std::array<std::byte, 12> bytes;
  random_bytes(bytes);
  std::string name = "bps-" + std::to_string(::getpid()) + "-";
  for (const std::byte b : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    name += kDigits[static_cast<unsigned>(b) >> 4];
    name += kDigits[static_cast<unsigned>(b) & 15];
  }
  return name;
}

Bytes to_address(const std::string& text) {
  const auto bytes = as_bytes(text);
  return {bytes.begin(), bytes.end()};
}

// Makes a key that nobody knows.
transport::Credentials no_credentials() {
  transport::Credentials none;
  random_bytes(none.job);
  random_bytes(none.key);
  return none;
}

}  // namespace

Listeners::Listeners(Enter enter) : credentials_(no_credentials()), enter_(std::move(enter)) {
  open([this] { listen_on_host(); });
}

Listeners::Listeners(const std::vector<transport::tcp::TcpRail>& tcp, const std::vector<transport::rdma::Rail>& rdma,
                     const PortRange& ports, Enter enter)
    : credentials_(no_credentials()), enter_(std::move(enter)) {
  open([&] {
    listen_on_network(tcp, rdma, ports);
    if (transport::shm::SharedMemory::why_unavailable() == 0) listen_on_host();
  });
}

void Listeners::open(const std::function<void()>& listen) {
  loop_.call([&] {
    try {
      listen();
    } catch (...) {  // what is open already must be closed on this thread
      close();
      throw;
    }
  });
}

Listeners::~Listeners() {
  loop_.call([this] { close(); });
}

void Listeners::use(const transport::Credentials& credentials) {
  loop_.call([&] { credentials_ = credentials; });
}

void Listeners::listen_on_host() {
  const std::string name = random_name();
  listen(Kind::kShm, transport::Listener::listen_local(name));
  publish(Kind::kShm, to_address(name));
}

void Listeners::listen_on_network(const std::vector<transport::tcp::TcpRail>& tcp,
                                  const std::vector<transport::rdma::Rail>& rdma, const PortRange& ports) {
  std::vector<transport::tcp::TcpAddress> addresses;
  for (const transport::tcp::TcpRail& rail : tcp) {
    // Loopback takes any port: there is no firewall within a host.
    Fd socket = listen_within(is_loopback(rail.address) ? PortRange{} : ports,
                              [&](std::uint16_t port) { return transport::Listener::listen_tcp(rail.address, port); });
    addresses.push_back({rail.address, transport::Listener::port_of(socket.get()), rail.speed});
    listen(Kind::kTcp, std::move(socket));
  }
  publish(Kind::kTcp, to_address(transport::tcp::to_text(addresses)));
  if (rdma.empty()) return;
  rdma_ = transport::rdma::open_rdma_listener(
      loop_.loop(), credentials_, rdma, ports,
      [this](std::unique_ptr<transport::IncomingConnection> incoming) { enter_(Kind::kRdma, std::move(incoming)); });
  publish(Kind::kRdma, rdma_->address());
}

void Listeners::close() {
  sockets_.clear();
  rdma_.reset();
  probes_.close();
}

void Listeners::listen(Kind kind, Fd socket) {
  sockets_.push_back(std::make_unique<transport::Listener>(
      loop_.loop(), std::move(socket), credentials_, [this, kind](transport::AuthenticatedSocket&& accepted) {
        if (kind == Kind::kTcp && accepted.hello.plane == transport::Plane::kProbe) {
          return probes_.take(std::move(accepted));
        }
        enter_(kind, std::make_unique<transport::IncomingSocket>(std::move(accepted)));
      }));
}

void Listeners::publish(Kind kind, Bytes address) {
  const std::string name(transport::to_string(kind));
  log_debug("accepts connections over " + name);
  addresses_.push_back({name, std::move(address)});
}

}  // namespace bps::node
