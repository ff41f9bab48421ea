// SPDX-License-Identifier: Apache-2.0
// Owns the loops of a process, their transports, and the server loops on them.
//
// Threading: the constructor, start_servers() and stop() belong to the thread that owns the process; the rest may be
// called from any thread until stop() has returned.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/exposition.h"
#include "core/trace_writer.h"
#include "node/startup.h"
#include "server/server_loop.h"
#include "transport/rdma/rdma.h"
#include "transport/reactor.h"
#include "transport/tcp/tcp_rails.h"
#include "van/messages.h"
#include "worker/worker_loop.h"

namespace bps::node {

// Holds one loop of this process with what runs on it.
struct Loop {
  std::unique_ptr<transport::Reactor> reactor;
  std::array<transport::Transport*, transport::kKinds> transports{};  // null: not on this loop
  std::unique_ptr<server::ServerLoop> server_loop;
  std::atomic<const server::RoundRecorder*> recorder{nullptr};  // that of server_loop, for threads that do not own it
  std::unique_ptr<worker::WorkerLoop> worker_loop;  // is destroyed first: what it still sends belongs to rounds
  std::uint64_t seen_turns = 0;                     // what the watchdog saw last
  // These are connections that came in before the membership was known, and groups that its server loop is to know.
  std::vector<std::pair<transport::Kind, std::unique_ptr<transport::IncomingConnection>>> early;
  std::vector<van::Group> groups;

  transport::Transport* transport(transport::Kind kind) const { return transports[static_cast<std::size_t>(kind)]; }
};

class Loops {
 public:
  // Makes the loops with their transports and starts their threads. Throws kUnreachable when BPS_TRANSPORT leaves only
  // RDMA and RDMA cannot be used. The loops tell `trace` what they do; it outlives them.
  Loops(const ProcessOptions& options, std::vector<transport::tcp::TcpRail> tcp_rails,
        const transport::Credentials& credentials, TraceWriter* trace = nullptr);
  Loops(const Loops&) = delete;
  Loops& operator=(const Loops&) = delete;

  Loop& operator[](std::size_t index) { return *loops_[index]; }
  // Returns the rails that RDMA works on; none when it is not used.
  const std::vector<transport::rdma::Rail>& rails() const { return rails_; }
  const std::vector<transport::tcp::TcpRail>& tcp_rails() const { return tcp_rails_; }

  // Starts the server loops when all members are known. `when_lost` is called when the connection to a worker broke,
  // and should call lose_node().
  using WhenLost = std::function<void(std::uint32_t node, const std::string& why)>;
  // `when_failed` is called when a round has failed.
  void start_servers(const van::Membership& members, const van::Node& self, const WhenLost& when_lost,
                     const std::function<void()>& when_failed);
  // Takes an incoming connection to the loop that its hello names.
  void accept(transport::Kind kind, std::unique_ptr<transport::IncomingConnection> incoming);
  // Calls `known`, on a loop, when every loop knows the group; never if one ends before.
  void add_group(const van::Group& group, std::function<void()> known);
  // Is called before lose_node() tells who is the cause.
  void end_view(const Error& why);
  void lose_node(std::uint32_t node, const std::string& why);
  void leave_node(std::uint32_t node, const std::string& why);
  // Fails a tensor about which ranks disagree, before some of them leave for this reason.
  void fail_tensor(std::uint32_t tensor, const std::string& why);
  // Returns true when the server loops have done what they have begun, and false when a loop has not answered in time.
  bool are_servers_quiet(const Deadline& deadline) const;
  // Ends the threads. Endpoints, transports and loops stay until this object is destroyed.
  void stop();

  // Returns the name of a loop that has made no progress since this returned "" last, and wakes it. For one watchdog.
  std::string find_stuck();
  // Returns true when a worker is connected to a server loop.
  bool serves() const;

  // Lists what each loop is working on, with at most `most` partitions and rounds of each. A loop that has not answered
  // by the deadline says nothing.
  struct OpenState {
    std::string loop;
    bool answered = false;
    std::size_t rounds = 0;  // the number of all its rounds
    worker::WorkerUsage worker{};
    std::vector<worker::OpenPartition> partitions{};
    std::vector<server::OpenRound> listed{};
    std::string last_failed_round{};  // that of the server loop; "" if none failed
  };
  // Returns the last rounds of the server loops that are over, the oldest first, also of loops that hang.
  std::vector<server::RoundRecorder::Record> recent_rounds(std::size_t most) const;
  std::vector<OpenState> open_state(std::size_t most, const Deadline& deadline) const;

  // Calls `told`, on a loop, with what the data connections over a network have carried; never if a loop ends before.
  void ask_link_use(std::function<void(const van::LinkUse&)> told) const;

  // Returns the sums over the loops.
  std::vector<std::pair<std::string, std::uint64_t>> counters() const;
  // Returns how long complete operations took, from start to end.
  MetricFamily operation_times() const;
  // Lists what each loop uses. A loop that has not answered by the deadline says nothing.
  struct Usage {
    std::string loop;
    bool answered = false;
    std::uint64_t slot_bytes = 0;
    std::uint64_t open_rounds = 0;
    double oldest_round_s = 0;
    worker::WorkerUsage worker{};
  };
  std::vector<Usage> usage(const Deadline& deadline) const;

 private:
  void find_rails();
  void make_loop(std::size_t index);
  void make_rdma_transports();
  void do_without_rdma(const std::string& why, const std::string& hint);
  void add(Loop& loop, transport::Kind kind, std::unique_ptr<transport::Transport> transport);
  static void accept_on(Loop& loop, transport::Kind kind, std::unique_ptr<transport::IncomingConnection> incoming);

  const ProcessOptions& options_;
  const transport::Credentials& credentials_;
  const std::vector<transport::tcp::TcpRail> tcp_rails_;
  std::vector<transport::rdma::Rail> rails_;
  std::vector<std::unique_ptr<Loop>> loops_;
};

}  // namespace bps::node
