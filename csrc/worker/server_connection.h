// SPDX-License-Identifier: Apache-2.0
// The connection of a worker loop to one loop of one server, and the sink of its endpoints. It is composed of rooms:
// the paths that reach the server, the landing slots that it has granted, the queue of what waits to be sent, what is
// under way, and what is known of its silence and of its loss.
//
// A connection by several paths (transport/control_paths.h) survives the loss of all but one: pushes that a lost path
// has not delivered are repeated by the others.
//
// Every server has a queue and credits of its own, so that a server that is busy never holds up another one.
// Threading: the loop's.
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
    double silence_s = 10;  // after which it counts as lost while it owes a reply
  };
  ServerConnection(Receiver& receiver, Server server, TransportMemory& registered)
      : node(server.node),
        name(std::move(server.name)),
        memory(registered),
        silence(server.silence_s),
        receiver_(receiver),
        epoch_(server.epoch) {}

  // Set-up: takes the connections, once they are attached with this as their sink.
  void open(std::vector<ServerPath> all);
  bool send(const tensor::ControlMessage& message);
  // Same-host servers read partitions in place; others need landing slots to write into.
  bool needs_slots() const { return !paths.is_direct(); }
  transport::DirectAccess* direct() const { return paths.streams().front().endpoint->direct(); }
  // The server has something to say: an answer, or slots to push into.
  bool owes_reply() const { return outstanding.partitions() > 0 || !queue.empty(); }

  // ---- Several paths
  // One that was lost is back.
  void add_path(ServerPath path) { paths.add(std::move(path)); }
  // Closes the paths by which the network carries nothing, as long as there are others.
  void check_paths();
  // The server has lost a path.
  void on_path_broken(std::uint16_t id);
  // The server has closed a path that was lost here, and says what it has received by it. Returns the path, whose
  // connections nobody needs any more.
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
  // The server may still write to our memory although the connection is given up.
  bool needs_fence() const { return direct() != nullptr && !direct()->is_fenced(); }
  // Ends the server's process, if that is how it is fenced. True while the process has time left to end.
  bool fence();
  // A server on this host may keep a log of what it was about to write, which is read once it can write no more.
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

  // The server may write the answer of a partition in flight where that partition wants it, and nothing else.
  std::size_t allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                           std::uint32_t immediate) override;
  void on_cut_off(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t bytes) override;
  // Lets no more of an answer land, and says how much of it has.
  std::uint64_t stop_landing(std::uint32_t immediate);
  void on_write(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) override;
  void on_posting(transport::DataEndpoint& from, std::span<const std::byte> header,
                  const transport::RemoteSpan& span) override;
  void on_written(transport::DataEndpoint& to, std::uint64_t token) override;
  void on_message(transport::ControlEndpoint& from, std::span<const std::byte> message) override;
  void on_lost(transport::Endpoint& peer, const std::string& why) override;

  const std::uint32_t node;
  const std::string name;  // for errors
  std::string reached_by;  // "tcp, 10.0.0.2 4711": how it is reached
  TransportMemory& memory;
  SendQueue queue;
  SendQueue fetching;  // what is still to be copied from a device, before it enters the queue
  LandingSlots slots;
  ServerPaths paths;
  PushesBySlot pushes;  // where there are several paths
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
