// SPDX-License-Identifier: Apache-2.0
// Connects a worker loop to one loop of one server, and is the sink of the endpoints. It is composed of parts: the
// paths that reach the server, the landing slots that it has granted, the queue of what waits to be sent, what is under
// way, and what is known of its silence and of its loss.
//
// A connection by several paths (transport/control_paths.h) survives the loss of all but one: pushes that a lost path
// has not delivered are repeated by the others.
//
// Every server has a queue and credits of its own, so that a server that is busy never holds up another one. Belongs to
// the loop's thread.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensor/control_messages.h"
#include "transport/transport.h"
#include "worker/held_log.h"
#include "worker/landing_slots.h"
#include "worker/outstanding.h"
#include "worker/send_queue.h"
#include "worker/server_loss.h"
#include "worker/server_paths.h"
#include "worker/silence.h"
#include "worker/transport_memory.h"

namespace bps::worker {

class Receiver;

class ServerConnection final : public transport::ControlSink, public transport::DataSink {
 public:
  struct Server {
    std::uint32_t node = 0;
    std::string name;  // for errors
    std::uint32_t epoch = 0;
    double silence_s = 10;  // how long it may be silent while it owes a reply, before it counts as lost
  };
  ServerConnection(Receiver& receiver, Server server, TransportMemory& registered)
      : node(server.node),
        name(std::move(server.name)),
        memory(registered),
        silence(server.silence_s),
        receiver_(receiver),
        epoch_(server.epoch) {}

  // Takes the connections, once they are attached with this as their sink. It is set-up.
  void open(std::vector<ServerPath> all);
  bool send(const tensor::ControlMessage& message);
  // Returns true where pushes are written into landing slots. A server on this host reads partitions in place instead.
  bool needs_slots() const { return !paths.is_direct(); }
  transport::DirectAccess* direct() const { return paths.streams().front().endpoint->direct(); }
  // Returns true when the server has something to say: an answer, or slots to push into.
  bool owes_reply() const { return outstanding.partitions() > 0 || !queue.empty(); }

  // ---- Several paths
  // Adds a path that was lost and is back.
  void add_path(ServerPath path) { paths.add(std::move(path)); }
  // Closes the paths by which the network carries nothing, as long as there are others.
  void check_paths();
  // To be called when the server has lost a path.
  void on_path_broken(std::uint16_t id);
  // To be called when the server has closed a path that was lost here, and says what it has received by it. Returns the
  // path, whose connections nobody needs any more.
  std::optional<ServerPath> settle(const tensor::PathLost& lost);
  // Tells the server which answers have come in.
  void send_receipts();

  // Tells the server what has landed.
  void send_landed();

  // ---- Loss
  bool is_closed() const { return loss.is_closed(); }
  // Closes all paths: from the return on nothing of the server comes in, and nothing is sent. A server that writes to
  // this process's memory directly must have been fenced before that memory is used again.
  void close();
  // Returns true while the server may still write to our memory although the connection is given up.
  bool needs_fence() const { return direct() != nullptr && !direct()->is_fenced(); }
  // Ends the server's process, if that is how it is fenced. Returns true while the process has time left to end.
  bool fence();
  // Holds the redo log of a server on this host, if it keeps one. The log is read once the server can write no more.
  void keep_log(const tensor::RedoLogAt& where);

  void add_slots(const tensor::Credits& credits);
  void count_answered(std::uint64_t bytes) {
    outstanding.note_answered(bytes);
    silence.note_word();
  }
  void count_landed(std::uint64_t bytes) {
    outstanding.note_landed(bytes);
    silence.note_word();
  }

  // Lets the server write the answer of a partition in flight where that partition wants it, and nothing else.
  std::size_t allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                           std::uint32_t immediate) override;
  void on_cut_off(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t bytes) override;
  // Lets no more of an answer land, and returns how much of it has.
  std::uint64_t stop_landing(std::uint32_t immediate);
  void on_write(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) override;
  void on_posting(transport::DataEndpoint& from, std::span<const std::byte> header,
                  const transport::RemoteSpan& span) override;
  void on_written(transport::DataEndpoint& to, std::uint64_t token) override;
  void on_message(transport::ControlEndpoint& from, std::span<const std::byte> message) override;
  void on_lost(transport::Endpoint& peer, const std::string& why) override;

  const std::uint32_t node;
  const std::string name;  // for errors
  std::string reached_by;  // how it is reached: "tcp, 10.0.0.2 4711"
  TransportMemory& memory;
  SendQueue queue;
  SendQueue fetching;  // transfers that are copied from a device before they enter the queue
  LandingSlots slots;
  ServerPaths paths;
  PushesBySlot pushes;  // kept where there are several paths
  Outstanding outstanding;
  Silence silence;
  ServerLoss loss;
  HeldLog log;
  std::vector<std::uint32_t> untold;  // immediates of answers in two phases that are here, until send_landed()

 private:
  void break_path(std::uint16_t id, const std::string& why);
  void send_keys(std::uint16_t lost, std::size_t rail, const ServerPath& other);

  Receiver& receiver_;
  const std::uint32_t epoch_;
};

}  // namespace bps::worker
