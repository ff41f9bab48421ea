// SPDX-License-Identifier: Apache-2.0
// Keeps the servers that a worker loop meets, by place, and what is registered with the transports that reach them. It
// also notes whether their send queues hold anything that could go out now, and whether they are owed words. Belongs to
// the loop's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "worker/server_connection.h"

namespace bps::worker {

class Connections {
 public:
  // `places` counts the server loops of the job, then the relays of this host that are not among them. A staging buffer
  // has `buffer_bytes`, and all those of a transport together have `staging_bytes`.
  Connections(std::size_t places, std::uint64_t buffer_bytes, std::uint64_t staging_bytes)
      : buffer_bytes_(buffer_bytes), staging_bytes_(staging_bytes), by_place_(places) {}

  // Adds the connection to the server at a place. It is set-up.
  ServerConnection& add(std::size_t place, Receiver& receiver, ServerConnection::Server server,
                        transport::Transport& transport);
  std::size_t places() const { return by_place_.size(); }
  // Returns the server at a place, which this loop must meet.
  ServerConnection& at(std::size_t place) { return *by_place_[place]; }
  std::size_t place_of(const ServerConnection& server) const;
  // The first returns a connection that has been opened, or nullptr. The second returns one that has not been lost.
  ServerConnection* find_connected(std::size_t place) const;
  ServerConnection* find_usable(std::size_t place) const;
  // Lists all that there are, by place.
  const std::vector<ServerConnection*>& all() const { return all_; }

  bool have_own_server() const { return has_own_server_; }
  void forget_memory(std::uint64_t identity);
  // Lets go of allocations of GPUs that have been freed.
  void drop_freed_of_devices();
  std::uint64_t registered_bytes() const;

  // Makes the end of the view the cause of the losses that follow.
  void end_view(const Error& why) { view_ended_ = why; }
  bool has_view_ended() const { return view_ended_.has_value(); }
  // Returns the error of operations that need this server, which is lost.
  Error failure_of(const ServerConnection& server) const {
    return view_ended_.value_or(Error(ErrorCode::kPeerLost, server.loss.why(), kRestartJob));
  }

  // ---- The send queues
  // Notes that something may go out, or has room now.
  void note_work() {
    if (queues_ == Queues::kIdle) queues_ = Queues::kReady;
  }
  // Notes that a queue holds something that has no room. The loop looks again in each turn, and may sleep: whatever
  // makes room wakes it.
  void note_blocked() { queues_ = Queues::kBlocked; }
  // To be called before the queues are looked at. Returns false where there is no need.
  bool take_work() { return std::exchange(queues_, Queues::kIdle) != Queues::kIdle; }
  bool is_ready() const { return queues_ == Queues::kReady; }
  bool is_blocked() const { return queues_ == Queues::kBlocked; }

  // ---- Words about answers that have come in; servers are told once a turn
  // Notes that an answer has come which the server keeps until it is told.
  void note_receipt() { is_receipt_due_ = true; }
  // Notes that an answer in two phases has landed; the server waits until all members have theirs.
  void note_landed() { is_landed_due_ = true; }
  bool owes_words() const { return is_receipt_due_ || is_landed_due_; }
  void send_words();

 private:
  enum class Queues : std::uint8_t { kIdle, kReady, kBlocked };
  TransportMemory& memory_of(transport::Transport& transport);

  const std::uint64_t buffer_bytes_;
  const std::uint64_t staging_bytes_;
  std::vector<std::unique_ptr<TransportMemory>> memory_;     // one per transport
  std::vector<std::unique_ptr<ServerConnection>> by_place_;  // null where this loop does not meet the server
  std::vector<ServerConnection*> all_;
  std::optional<Error> view_ended_;
  Queues queues_ = Queues::kIdle;
  bool is_receipt_due_ = false;
  bool is_landed_due_ = false;
  bool has_own_server_ = false;
};

}  // namespace bps::worker
