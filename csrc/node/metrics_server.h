// SPDX-License-Identifier: Apache-2.0
// Answers GET /metrics over HTTP, for Prometheus.
//
// It runs on a thread of its own, on which neither heartbeats nor data depend. It reads and never changes anything. It
// costs little whoever connects: a few connections at a time, the oldest of which makes room for the next, a request of
// a few kilobytes, and a few seconds for each.
//
// `text` runs on that thread. The destructor waits for it. The constructor throws kPortTaken, or kInvalidArgument when
// the address does not belong to this machine.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "core/event_loop.h"
#include "core/exposition.h"
#include "core/fd.h"
#include "core/settings.h"

namespace bps::node {

class MetricsServer {
 public:
  static constexpr std::size_t kMostConnections = 16;
  static constexpr std::size_t kMostRequest = 8192;
  static constexpr double kPatience_s = 5;

  MetricsServer(const std::string& address, std::uint16_t port, std::function<std::string()> text);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

 private:
  struct Connection {
    Fd socket;
    std::string request{};
    std::string answer{};  // what is left to be sent, once there is one
    bool answers = false;
    Timer expiry{};
  };
  using Connections = std::list<Connection>;

  void run();
  void accept_some();
  void advance(Connections::iterator connection);
  bool receive(Connection& connection);  // returns false when the connection is to be closed
  bool send(Connection& connection);
  std::string answer_to(const std::string& request) const;
  void close(Connections::iterator connection);

  const std::function<std::string()> text_;
  EventLoop loop_;
  Fd listener_;
  Connections connections_;  // the oldest first
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// Serves these families, and those of any process, where BPS_METRICS_PORT wants it, at that port plus `offset`. Without
// a free port nothing is served, and the log says so: a job does not fail because nobody can watch it.
std::unique_ptr<MetricsServer> serve(const MetricsSettings& settings, std::uint32_t offset,
                                     std::function<MetricFamilies()> families);

}  // namespace bps::node
