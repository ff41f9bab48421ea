// SPDX-License-Identifier: Apache-2.0
// Connects the worker loops of this process to the server loops of the job.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "node/loops.h"
#include "van/hosts.h"

namespace bps::node {

class Connector {
 public:
  // `self` is this process; all must outlive the connector.
  Connector(const ProcessOptions& options, const van::Membership& members, const van::Node& self,
            const van::Hosts& hosts, Loops& loops);

  // Connects worker loop `index` to a place (Worker::places). Blocks. Throws kUnreachable, kAuthentication or kVersion
  // naming the server, and kTimeout when the deadline passes.
  void connect(std::size_t index, std::size_t place, const Deadline& deadline);
  // How this process reaches the servers that it is connected to, in the order of connecting.
  std::vector<transport::Kind> routes() const;

 private:
  struct Target {
    const van::Node& server;  // or relay
    std::size_t place;
    transport::Hello hello;
  };
  Target target_at(std::size_t index, std::size_t place) const;
  transport::Kind connect_to(Loop& loop, const Target& target, const Deadline& deadline);
  void connect_self(Loop& loop, const Target& target, const Deadline& deadline);
  static worker::ServerConnection& add_server(Loop& loop, const Target& target, transport::Transport& transport);
  void connect_by(transport::Kind kind, Loop& loop, const Target& target, const Deadline& deadline);
  struct Connections {
    std::unique_ptr<transport::ControlEndpoint> control;
    std::vector<std::unique_ptr<transport::DataEndpoint>> data;
  };
  Connections connect_rails(transport::Transport& transport, transport::ConnectRequest request, std::uint32_t node,
                            std::size_t wanted);
  double patience(std::uint32_t node, std::size_t pair) const;
  void note(std::uint32_t node, std::size_t pair, const Error* failure);
  std::size_t data_connections(transport::Kind kind) const;

  const ProcessOptions& options_;
  const van::Membership& members_;
  const van::Node& self_;
  const van::Hosts& hosts_;
  Loops& loops_;
  mutable std::mutex mutex_;
  std::vector<transport::Kind> routes_;
  struct RailsTried {
    bool works = false;              // with some node
    std::set<std::uint32_t> failed;  // nodes that were not reached
  };
  std::map<std::size_t, RailsTried> rails_tried_;  // by the number of the pair
};

}  // namespace bps::node
