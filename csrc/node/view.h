// SPDX-License-Identifier: Apache-2.0
// A view holds what a process has in one view of its job: loops, listeners, connections to servers, and the worker.
// They are made and destroyed as one.
//
// It is made before the process joins, because the scheduler has to be told where it listens. start() completes it when
// the process has joined. stop() ends the threads, and the destructor takes everything down.
//
// The van's thread and the loops tell it of losses, even before the worker is made. A holder of the lock neither waits
// for a loop, nor ends a thread, nor destroys what could. Everything else belongs to the owner.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/trace_writer.h"
#include "node/connector.h"
#include "node/inspection.h"
#include "node/listeners.h"
#include "node/loops.h"
#include "node/startup.h"
#include "transport/handshake.h"
#include "transport/tcp/tcp_rails.h"
#include "van/hosts.h"
#include "worker/worker.h"

namespace bps::node {

class View {
 public:
  // Any thread calls these, perhaps with the lock held.
  struct Events {
    std::function<void(std::uint32_t node, const std::string& why)> suspect;  // a connection broke
    std::function<void(std::uint32_t node)> inquire;                          // a node is silent
    std::function<void(Failure)> on_failure;
  };

  // `trace` is what the loops tell what they do, or null; it outlives this object.
  View(const ProcessOptions& options, std::vector<transport::tcp::TcpRail> rails, TraceWriter* trace, Events events);
  ~View();
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  // Adds what the other members need to connect to this process.
  void describe(van::Node& self) const;
  // Starts the server loops when the process has joined, and connects the worker, if it is one.
  void start(van::Van& van);
  // Notes that this process leaves: lost connections are nobody's fault from here on.
  void begin_leaving() { is_leaving_ = true; }
  // Ends the threads, and the attempts to connect.
  void stop();

  Loops& loops() { return loops_; }
  const Loops& loops() const { return loops_; }
  // Returns null on a process that is no worker, and before start() has made it.
  worker::Worker* worker() const { return ready_worker_.load(std::memory_order_acquire); }
  std::vector<transport::Kind> transports() const {
    return connector_ ? connector_->transports() : std::vector<transport::Kind>();
  }

  // ---- The van's thread
  // Replaces the credentials: a process of an earlier run of this job has other ones from here on.
  void use(const transport::Credentials& credentials);
  void lose_node(std::uint32_t node, const std::string& why);
  void leave_node(std::uint32_t node, const std::string& why);
  void end_view(const Error& why);

 private:
  struct EarlyEvent {
    std::uint32_t node;
    std::string why;
    bool lost;  // false: it left as it should
  };
  bool is_early() const { return options_.startup.is_worker() && !worker() && !is_leaving_; }
  std::uint64_t link_speed() const;
  std::uint64_t sum_rate(std::uint64_t link) const;
  void start_servers(van::Van& van);
  void make_worker(van::Van& van);
  std::unique_ptr<worker::Worker> connect_worker(van::Van& van);
  void make_worker_loop(std::size_t index, const worker::Worker& worker, van::Van& van);
  std::uint64_t wished_partition(const van::Van& van) const;
  void lose_connection(std::uint32_t node, const std::string& why);

  const ProcessOptions& options_;
  TraceWriter* const trace_;
  const Events events_;
  transport::Credentials credentials_;  // those for connections between members; set before this process joins
  Loops loops_;
  std::unique_ptr<Listeners> listeners_;
  const van::Membership* members_ = nullptr;  // set once joined
  van::Hosts hosts_;
  std::unique_ptr<Connector> connector_;
  std::unique_ptr<worker::Worker> worker_;
  std::atomic<worker::Worker*> ready_worker_{nullptr};
  std::atomic<bool> is_leaving_{false};
  std::mutex mutex_;
  std::vector<EarlyEvent> early_events_;  // guarded by mutex_
};

}  // namespace bps::node
