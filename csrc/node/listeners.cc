// Who may come in: this process's doors, their addresses for the others, and the way from a door to a loop.
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "core/hmac.h"
#include "core/log.h"
#include "node/local_address.h"
#include "node/process_impl.h"
#include "transport/tcp/tcp_transport.h"

namespace bps::node {
namespace {

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

Bytes as_address(const std::string& text) {
  const auto bytes = as_bytes(text);
  return {bytes.begin(), bytes.end()};
}

}  // namespace

void Process::Impl::open_listeners(van::Node& self) {
  if (!is_server()) {
    // Nobody calls a worker; that it can call by RDMA is worth knowing, though.
    if (!rails_.empty()) self.addresses.push_back({"rdma", {}});
    return;
  }
  const std::string host =
      local_address(config_.text("BPS_NODE_HOST"), config_.text("BPS_INTERFACE"), startup_.scheduler_host);
  const std::string local_name = random_name();
  on_van([&] {
    const auto door = [&](Fd listener, std::string transport) {
      listeners_.push_back(std::make_unique<transport::Listener>(
          van_->loop(), std::move(listener), credentials_,
          [this, transport = std::move(transport)](Fd fd, const transport::Hello& hello) {
            dispatch(transport, std::make_unique<transport::IncomingSocket>(std::move(fd), hello));
          }));
    };
    Fd tcp = transport::Listener::listen_tcp(host, 0);
    const std::string address =
        transport::tcp::TcpTransport::make_address(host, transport::Listener::port_of(tcp.get()));
    self.addresses.push_back({"tcp", as_address(address)});
    door(std::move(tcp), "tcp");
    self.addresses.push_back({"shm", as_address(local_name)});
    door(transport::Listener::listen_local(local_name), "shm");
    if (!rails_.empty()) {
      rdma_listener_ = transport::rdma::open_rdma_listener(
          van_->loop(), credentials_, rails_,
          [this](std::unique_ptr<transport::IncomingConnection> incoming) { dispatch("rdma", std::move(incoming)); });
      self.addresses.push_back({"rdma", rdma_listener_->address()});
    }
    log_debug("listens by tcp at " + address + " and by shm at " + local_name);
  });
}

// On the van's thread: hands the incoming to the loop it wants to see.
void Process::Impl::dispatch(const std::string& transport, std::unique_ptr<transport::IncomingConnection> incoming) {
  const transport::Hello& hello = incoming->hello;
  if (hello.server_loop >= server_loops_ || hello.plane == transport::Plane::kVan) return;
  Loop& loop = *loops_[hello.server_loop];
  auto moved = std::make_shared<std::unique_ptr<transport::IncomingConnection>>(std::move(incoming));
  loop.reactor->loop().post([this, &loop, transport, moved] { accept_connection(loop, transport, std::move(*moved)); });
}

void Process::Impl::accept_connection(Loop& loop, const std::string& transport,
                                      std::unique_ptr<transport::IncomingConnection> incoming) {
  if (!loop.server_loop) {
    loop.early.emplace_back(transport, std::move(incoming));
    return;
  }
  transport::Transport* way = loop.reactor->transport(transport);
  try {
    loop.server_loop->accept(std::move(incoming), way);
  } catch (const Error& error) {  // one caller less; the others are not to suffer
    log_warning("could not let a caller in by " + transport + ": " + error.what() + " (" + error.hint() + ")");
  }
}

}  // namespace bps::node
