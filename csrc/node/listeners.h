// SPDX-License-Identifier: Apache-2.0
// Runs the listeners of a server process: one per transport by which peers may connect.
//
// They have a thread of their own. `enter` is called on it with each connection that has authenticated itself.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/port_range.h"
#include "node/startup.h"
#include "transport/listener.h"
#include "transport/rdma/rdma.h"
#include "transport/tcp/link_probe.h"
#include "transport/tcp/tcp_rails.h"

namespace bps::node {

class Listeners {
 public:
  using Enter = std::function<void(transport::Kind, std::unique_ptr<transport::IncomingConnection>)>;

  // Listens for peers on this host alone.
  explicit Listeners(Enter enter);
  // Listens for all peers, at ports of that range. Throws kPortTaken, or kInvalidArgument when the address does not
  // belong to this host.
  Listeners(const std::vector<transport::tcp::TcpRail>& tcp, const std::vector<transport::rdma::Rail>& rdma,
            const PortRange& ports, Enter enter);
  ~Listeners();
  Listeners(const Listeners&) = delete;
  Listeners& operator=(const Listeners&) = delete;

  // Lets peers connect, which nobody can before. Waits until it holds.
  void use(const transport::Credentials& credentials);
  // Returns the addresses at which peers connect, for the scheduler to tell them.
  const std::vector<van::TransportAddress>& addresses() const { return addresses_; }

 private:
  void open(const std::function<void()>& listen);
  void listen_on_host();
  void listen_on_network(const std::vector<transport::tcp::TcpRail>& tcp,
                         const std::vector<transport::rdma::Rail>& rdma, const PortRange& ports);
  void close();
  void listen(transport::Kind kind, Fd socket);
  void publish(transport::Kind kind, Bytes address);

  transport::ListenerLoop loop_;
  transport::Credentials credentials_;  // read by the listeners, on their thread
  const Enter enter_;
  std::vector<std::unique_ptr<transport::Listener>> sockets_;
  std::unique_ptr<transport::rdma::RdmaListener> rdma_;
  transport::tcp::ProbeSink probes_{loop_.loop()};
  std::vector<van::TransportAddress> addresses_;
};

}  // namespace bps::node
