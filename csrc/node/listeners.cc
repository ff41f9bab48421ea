// SPDX-License-Identifier: Apache-2.0
#include "node/listeners.h"

#include <unistd.h>

#include <array>

#include "core/hmac.h"
#include "core/log.h"
#include "transport/tcp/tcp_transport.h"

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

// What nobody knows.
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

Listeners::Listeners(const std::string& host, const std::vector<transport::rdma::Rail>& rails, Enter enter)
    : credentials_(no_credentials()), enter_(std::move(enter)) {
  open([&] {
    listen_on_network(host, rails);
    listen_on_host();
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
  listen(Kind::kShm, transport::Listener::listen_local(name), to_address(name));
}

void Listeners::listen_on_network(const std::string& host, const std::vector<transport::rdma::Rail>& rails) {
  Fd tcp = transport::Listener::listen_tcp(host, 0);
  const std::uint16_t port = transport::Listener::port_of(tcp.get());
  listen(Kind::kTcp, std::move(tcp), to_address(transport::tcp::TcpTransport::make_address(host, port)));
  if (rails.empty()) return;
  rdma_ = transport::rdma::open_rdma_listener(
      loop_.loop(), credentials_, rails,
      [this](std::unique_ptr<transport::IncomingConnection> incoming) { enter_(Kind::kRdma, std::move(incoming)); });
  publish(Kind::kRdma, rdma_->address());
}

void Listeners::close() {
  sockets_.clear();
  rdma_.reset();
}

void Listeners::listen(Kind kind, Fd socket, Bytes address) {
  sockets_.push_back(std::make_unique<transport::Listener>(
      loop_.loop(), std::move(socket), credentials_, [this, kind](transport::AuthenticatedSocket&& accepted) {
        enter_(kind, std::make_unique<transport::IncomingSocket>(std::move(accepted)));
      }));
  publish(kind, std::move(address));
}

void Listeners::publish(Kind kind, Bytes address) {
  const std::string name(transport::to_string(kind));
  log_debug("accepts connections over " + name);
  addresses_.push_back({name, std::move(address)});
}

}  // namespace bps::node
