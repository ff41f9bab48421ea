// SPDX-License-Identifier: Apache-2.0
// Connects the worker loops of this process to the server loops of the job, by all their rails. Where the connections
// over different rails are paths that may be lost (Transport::fails_over), it tries those again in the background that
// are lost, or were not there at the start.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "node/loops.h"
#include "node/retries.h"
#include "van/hosts.h"
#include "van/server_places.h"

namespace bps::node {

class Connector {
 public:
  // `self` is this process. All must outlive the connector.
  Connector(const ProcessOptions& options, const van::Membership& members, const van::Node& self,
            const van::Hosts& hosts, Loops& loops);

  // Connects worker loop `index` to a place (worker/places.h). Blocks. Throws kUnreachable, kAuthentication or kVersion
  // naming the server, and kTimeout when the deadline passes.
  void connect(std::size_t index, std::size_t place, const Deadline& deadline);
  // Connects a lost path to the place again, when that works. May be called from any thread.
  void restore(std::size_t index, std::size_t place, std::size_t pair);
  // Tries nothing again after the return. Must be called before the loops stop.
  void stop() { retries_.stop(); }
  // Names the transports to the connected servers, in the order of connecting.
  std::vector<transport::Kind> transports() const;

 private:
  struct Target {
    const van::Node& server;  // or a relay
    std::size_t place;
    transport::Hello hello;
  };
  Target target_at(std::size_t index, std::size_t place) const;
  transport::Kind connect_to(Loop& loop, const Target& target, const Deadline& deadline);
  void connect_self(Loop& loop, const Target& target, const Deadline& deadline);
  static worker::ServerConnection& add_server(Loop& loop, const Target& target, transport::Transport& transport);
  void require_reachable(const van::Node& server) const;
  void connect_by(transport::Kind kind, Loop& loop, const Target& target, const Deadline& deadline);
  struct MadePath {
    std::uint16_t id = 0;
    std::size_t pair = 0;
    std::unique_ptr<transport::ControlEndpoint> control{};
    std::vector<std::unique_ptr<transport::DataEndpoint>> data{};
  };
  std::vector<MadePath> connect_rails(transport::Transport& transport, transport::ConnectRequest request,
                                      std::uint32_t node, std::size_t wanted);
  static void connect_pair(transport::Transport& transport, const transport::ConnectRequest& request,
                           std::size_t streams, MadePath& path);
  static worker::ServerPath attach(MadePath made, transport::Transport& transport, worker::ServerConnection& server);
  static transport::ConnectRequest request_for(transport::Kind kind, const Target& target, const Deadline& deadline);
  bool try_restore(std::size_t index, std::size_t place, std::size_t pair);
  double patience(std::uint32_t node, std::size_t pair) const;
  void note(std::uint32_t node, std::size_t pair, const Error* failure);
  std::size_t data_connections(transport::Kind kind) const;

  const ProcessOptions& options_;
  const van::Membership& members_;
  const van::ServerPlaces places_;
  const van::Node& self_;
  const van::Hosts& hosts_;
  Loops& loops_;
  mutable std::mutex mutex_;
  std::vector<transport::Kind> routes_;
  struct RailsTried {
    bool works = false;              // with some node
    std::set<std::uint32_t> failed;  // nodes that were not reached
  };
  std::map<std::size_t, RailsTried> rails_tried_;  // by the number of the pair of rails
  std::atomic<std::uint16_t> latest_path_{0};      // that of the last one connected again; the start has the first
  Retries retries_;                                // is the last member: its thread uses the rest
};

}  // namespace bps::node
