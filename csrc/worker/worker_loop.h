// SPDX-License-Identifier: Apache-2.0
// Runs one loop of a worker: operations come in, partitions go out, answers come back. All of it runs to completion on
// one thread. So nothing is handed between threads but the operation itself, once on its way in (a bounded ring) and
// once when its caller wakes.
//
//   submit() -> Admission: set-up, registers memory -> send queue of each server -> Sender -> ... -> Receiver
//
// This class composes the parts, gives them their turns, and is what the rest of the process speaks to:
//
//   connections.h           the servers that the loop meets, and their send queues
//   admission.h, sender.h   the way out
//   receiver.h              the way in
//   partitions_in_flight.h  what is under way
//   cancellation.h          aborts
//   device_copies.h         copies from GPUs and to them
//   device_gate.h           arrays of GPUs that RDMA devices use themselves
//   reply_watch.h           servers that owe something for too long
//   server_losses.h         lost servers and paths
//   relay_sender.h          what a relay sends for its host
//
// Any thread may call submit(); everything else belongs to the reactor's thread.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/reactor.h"
#include "worker/admission.h"
#include "worker/cancellation.h"
#include "worker/connections.h"
#include "worker/device_copies.h"
#include "worker/loop_events.h"
#include "worker/open_partition.h"
#include "worker/partitions_in_flight.h"
#include "worker/receiver.h"
#include "worker/relay_sender.h"
#include "worker/reply_watch.h"
#include "worker/sender.h"
#include "worker/server_losses.h"
#include "worker/watched_operations.h"
#include "worker/worker_usage.h"

namespace bps::worker {

struct WorkerLoopOptions {
  std::size_t index = 0;
  std::size_t places = 1;               // server loops of the job, then relays of this host that are not among them
  std::uint64_t scheduling_credit = 0;  // bytes that may be in flight; 0: no limit
  std::uint64_t largest_partition = 0;
  std::uint64_t staging_bytes = 0;
  bool survives_servers = false;  // see tensor::kTwoPhase
  std::uint32_t epoch = 1;
  bool gpudirect = false;          // RDMA devices use the memory of GPUs themselves where they can
  double silence_s = 10;           // how long a server that owes a reply may be silent before it counts as lost
  std::string name = "this rank";  // for errors that all ranks are told
};

class WorkerLoop final : public transport::Actor {
 public:
  WorkerLoop(WorkerLoopOptions options, transport::Reactor& reactor);
  ~WorkerLoop();

  transport::Reactor& reactor() { return reactor_; }

  // ---- Set-up
  // Makes the sink for the endpoints of a connection. open() is to be called when they are attached.
  ServerConnection& add_server(std::size_t place, std::uint32_t node, std::string name,
                               transport::Transport& transport);
  void open(ServerConnection& server, transport::ControlEndpoint* control, std::vector<transport::DataEndpoint*> data) {
    open(server, {{.control = control, .data = std::move(data)}});
  }
  void open(ServerConnection& server, std::vector<ServerPath> paths);
  // Returns the connection at this place, for a path that has been lost and is connected again, or nullptr when the
  // server is lost. add_path() is to follow, once the endpoints are attached.
  ServerConnection* find_server(std::size_t place) const { return connections_.find_usable(place); }
  void add_path(ServerConnection& server, ServerPath path);
  // Makes this loop send its host's contributions.
  void relay_for(tensor::ContributionSource* source) { contributions_.set_source(source); }
  RelaySender& relay() { return relay_; }
  // To be called before this rank's first operation on a tensor that was declared with a compression.
  void add_compressed(const std::shared_ptr<const Tensor>& tensor) { relay_.add_compressed(tensor); }

  // Returns true when what goes to the server at this place is encoded. To be called on the loop's thread.
  bool compresses_to(std::size_t place, const Tensor& tensor) const {
    const ServerConnection* const server = connections_.find_connected(place);
    return server != nullptr && worker::compresses_to(*server, tensor);
  }

  // ---- Operations
  // Any thread may submit, and then wakes the reactor's progress or drives it. Throws kTimeout when the loop does not
  // keep up with the submissions. One loop of each operation watches its deadline.
  void submit(const std::shared_ptr<Operation>& operation, bool watches_deadline) {
    admission_.submit(operation, watches_deadline);
  }
  // Aborts every operation that `concerns` answers true for.
  void abort_operations(const std::function<bool(const Operation&)>& concerns, ErrorCode code, const std::string& what,
                        const std::string& hint);
  // Aborts all operations, and those that are submitted later, because this process leaves.
  void leave(const Error& why);
  // Cancels this loop's part of an operation that is failing.
  void cancel(Operation& operation) { cancellation_.cancel(operation); }
  // Returns true when no operation is on its way, waits to be sent, or has just been submitted.
  bool is_idle() const;

  // ---- Losses
  // Aborts everything with this error, which also stands for the losses that follow.
  void end_view(const Error& why);
  // `why` is a sentence that names the cause.
  void lose_server(std::uint32_t node, const std::string& why) { losses_.lose(node, why); }
  // To be called when the scheduler has heard of a server that when_silent was called for.
  void on_reachable(std::uint32_t node);
  void forget_memory(std::uint64_t identity) { connections_.forget_memory(identity); }

  // ---- For people
  // Lists partitions that are not finished, at most so many: first those that were sent.
  std::vector<OpenPartition> list_open(std::size_t most) const {
    return worker::list_open(partitions_.table, connections_, copies_, most);
  }
  // Returns true when there is a server that it does not share memory with.
  bool uses_network() const {
    return std::ranges::any_of(connections_.all(), [](const ServerConnection* server) {
      return !server->is_closed() && !server->paths.streams().empty() && server->needs_slots();
    });
  }
  WorkerUsage usage() const { return usage_of(connections_, watched_); }
  // Calls `look` with each data connection to a server that is not lost, and the server's node.
  void for_each_connection(const std::function<void(std::uint32_t, transport::DataEndpoint&)>& look) const {
    for (const ServerConnection* server : connections_.all()) {
      if (server->is_closed()) continue;
      for (const ServerStream& stream : server->paths.streams()) look(server->node, *stream.endpoint);
    }
  }

  bool step() override;
  bool arm() override {
    if (copies_.is_used() && !copies_.arm()) return false;
    return admission_.is_empty() && !connections_.owes_words() && !connections_.is_ready();
  }
  bool blocked() const override { return connections_.is_blocked() || copies_.is_blocked(); }

  LoopEvents events;

 private:
  bool take_submissions();
  bool serve(ServerConnection& server);
  void check_deadlines();
  void check_paths();

  const WorkerLoopOptions options_;
  transport::Reactor& reactor_;
  Connections connections_;
  PartitionsInFlight partitions_;
  ReplyWatch watch_;
  Cancellation cancellation_;
  DeviceCopies copies_;
  HostContributions contributions_;
  RelaySender relay_;
  ServerLosses losses_;
  Receiver receiver_;
  Admission admission_;
  Sender sender_;
  WatchedOperations watched_;
  std::vector<Timer> timers_;
};

}  // namespace bps::worker
