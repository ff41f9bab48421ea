// SPDX-License-Identifier: Apache-2.0
// Connects the worker loops of this process to the server loops of the job.
#pragma once

#include <vector>

#include "node/loops.h"
#include "van/membership.h"

namespace bps::node {

class Connector {
 public:
  // `self` is this process; all three must outlive the connector.
  Connector(const ProcessOptions& options, const van::Membership& members, const van::Node& self, Loops& loops);

  // Connects worker loop `index` to every server loop that it sends to. Blocks. Throws kUnreachable, kAuthentication or
  // kVersion naming the server, and kTimeout when the deadline passes.
  void connect(std::size_t index, const Deadline& deadline);
  // How this process reaches each server, by server rank.
  const std::vector<transport::Kind>& routes() const { return routes_; }

 private:
  struct Target {
    const van::Node& server;
    std::size_t place;  // of this server loop among those of all servers
    transport::Hello hello;
  };
  transport::Kind connect_to(Loop& loop, const Target& target, const Deadline& deadline);
  void connect_self(Loop& loop, const Target& target, const Deadline& deadline);
  static worker::ServerConnection& add_server(Loop& loop, const Target& target, transport::Transport& transport);
  void connect_by(transport::Kind kind, Loop& loop, const Target& target, const Deadline& deadline);
  std::size_t data_connections(transport::Kind kind) const;

  const ProcessOptions& options_;
  const van::Membership& members_;
  const van::Node& self_;
  Loops& loops_;
  std::vector<transport::Kind> routes_;
};

}  // namespace bps::node
