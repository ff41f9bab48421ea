// SPDX-License-Identifier: Apache-2.0
// The connection of a worker loop to one loop of one server: its endpoints, the landing slots that the server has
// granted, and what waits to be sent. It is the sink of its endpoints.
//
// Where the two are joined by several paths (transport/control_paths.h) it survives the loss of all but one: pushes
// that a lost path has not delivered are repeated by the others.
//
// Every server has a queue and credits of its own, so that a server that is busy never holds up another one.
// Threading: the loop's.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensor/control_messages.h"
#include "tensor/redo_log.h"
#include "transport/transport.h"
#include "worker/landing_slots.h"
#include "worker/rail_shares.h"
#include "worker/send_queue.h"
#include "worker/server_paths.h"
#include "worker/transport_memory.h"

namespace bps::worker {

class WorkerLoop;

class ServerConnection final : public transport::ControlSink, public transport::DataSink {
 public:
  ServerConnection(WorkerLoop& loop, std::uint32_t its_node, std::string server_name, TransportMemory& registered,
                   std::uint32_t epoch)
      : node(its_node), name(std::move(server_name)), memory(registered), loop_(loop), epoch_(epoch) {}

  // Set-up: the connections, once they are attached with this as their sink.
  void open(std::vector<ServerPath> paths);
  bool is_open() const { return !paths_.streams().empty(); }
  bool send(const tensor::ControlMessage& message);
  std::size_t data_endpoints() const { return paths_.streams().size(); }
  // Same-host servers read partitions in place; others need landing slots to write into.
  bool needs_slots() const { return needs_slots_; }
  transport::DirectAccess* direct() const { return paths_.streams().front().endpoint->direct(); }
  // The endpoint that the next batch goes out by, and the bytes of that batch, whether there was room for it or not.
  std::size_t next_endpoint() const { return shares_.next(); }
  transport::DataEndpoint& endpoint(std::size_t index) { return *paths_.streams()[index].endpoint; }
  void count_batch(std::size_t index, std::uint64_t bytes) { shares_.charge(index, bytes); }
  // Closes the connection: from the return on nothing of the server comes in, and nothing is sent. A server that writes
  // to this process's memory directly must have been fenced before that memory is used again.
  void abandon();
  bool is_lost() const { return lost_; }

  // ---- Several paths
  bool fails_over() const { return paths_.fails_over(); }
  // One that was lost is back.
  void add_path(ServerPath path);
  // Pushes that were posted, to find those that a lost path has not delivered.
  void note_push(const tensor::SlotCredit& slot, std::uint32_t immediate, std::size_t endpoint) {
    pushes_.note(slot, immediate, paths_.streams()[endpoint]);
  }
  // Those that have to be repeated; each holds its slot.
  std::vector<RepeatedPush> repeats;
  // Closes the paths by which the network carries nothing, as long as there are others.
  void check_paths();
  // The server has lost a path.
  void on_path_broken(std::uint16_t id);
  // The server has closed a path that was lost here, and says what it has received by it. Returns the path, whose
  // connections nobody needs any more.
  std::optional<ServerPath> settle(const tensor::PathLost& lost);
  // Tells the server which answers have come in.
  void send_receipts();

  // In two phases: answers that are here, of which the server is told with the next send_landed(). Their number.
  std::size_t note_landed(std::uint32_t immediate) {
    landed_.immediates.push_back(immediate);
    return landed_.immediates.size();
  }
  void forget_landed(std::uint32_t immediate) { std::erase(landed_.immediates, immediate); }
  void send_landed();

  // The scheduler has been asked for the cause of its loss.
  void note_report() { reported_ = true; }
  bool is_reported() const { return reported_; }
  // A sentence that names the cause; empty until lose() was told it.
  void lose(const std::string& why) { why_lost_ = why; }
  const std::string& why_lost() const { return why_lost_; }
  // The server may still write to our memory although the connection is given up.
  bool needs_fence() const { return direct() != nullptr && !direct()->is_fenced(); }
  // Ends the server's access, see DirectAccess::fence(), or has begun to: true while the server has time left to end.
  bool is_being_fenced();
  bool is_ending() const { return ends_by_.has_value(); }
  void note_ended() { ends_by_.reset(); }
  // A server on this host may keep a log of what it was about to write, which is read once it can write no more.
  void keep_log(const tensor::RedoLogAt& where);
  const tensor::RedoLog* log() const { return log_ ? &*log_ : nullptr; }
  // The server has until then to finish by itself.
  Deadline fence_at = Deadline::after(0);

  // For how long the server has said nothing although it owes a reply; asked at regular intervals. `forgive`: this
  // process was stopped itself, and cannot tell.
  Duration silence(Clock::time_point now, bool forgive);
  // True once for each silence.
  bool note_suspicion() { return !std::exchange(suspected_, true); }
  // The scheduler still hears a server that is silent here: so the network is cut, unless the server was stopped for a
  // while and speaks up now. Where its whole machine was, TCP sends again what that has missed, at the latest after as
  // much time again as has passed since the first attempt.
  void expect_word_until(Clock::time_point now, Duration least) {
    if (suspected_) word_expected_until_ = now + std::max(least, Duration(now - silent_since_));
  }
  bool is_expected(Clock::time_point now) const {
    return suspected_ && word_expected_until_ != Clock::time_point::max() && now < word_expected_until_;
  }
  bool is_cut_off(Clock::time_point now) const { return suspected_ && now >= word_expected_until_; }

  void add_slots(const tensor::Credits& credits);
  // The slot's key on a connection to that rail of the server.
  std::uint64_t slot_key(const tensor::SlotCredit& slot, std::size_t rail) const;

  // Partitions under way to the server, and their bytes. One that is cancelled before it was sent counts with no bytes.
  std::uint64_t bytes_in_flight() const { return bytes_in_flight_; }
  std::size_t partitions_in_flight() const { return in_flight_; }
  void count_sent(std::uint64_t bytes) {
    bytes_in_flight_ += bytes;
    ++in_flight_;
  }
  void count_unsent(std::uint64_t bytes) {
    bytes_in_flight_ -= bytes;
    --in_flight_;
  }
  void count_answered(std::uint64_t bytes) {
    count_unsent(bytes);
    answered_ = heard_ = true;
  }
  // In two phases the answer is here, and makes room for others; count_answered() follows, with no bytes.
  void count_landed(std::uint64_t bytes) {
    bytes_in_flight_ -= bytes;
    answered_ = heard_ = true;
  }
  // Nothing has been answered for a while. Only a sender that is held up asks, and only then is the clock read.
  bool is_stuck();
  void restart_stuck_timer() { answered_ = true; }

  // The server may write the answer of a partition in flight where that partition wants it, and nothing else.
  std::size_t allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                           std::uint32_t immediate) override;
  void on_cut_off(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t bytes) override;
  // Lets no more of an answer land, and says how much of it has.
  std::uint64_t stop_landing(std::uint32_t immediate);
  void on_write(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) override;
  void on_descriptor(transport::DataEndpoint& from, std::span<const std::byte> header,
                     const transport::RemoteSpan& span) override;
  void on_written(transport::DataEndpoint& to, std::uint64_t token) override;
  void on_message(transport::ControlEndpoint& from, std::span<const std::byte> message) override;
  void on_lost(transport::Endpoint& peer, const std::string& why) override;

  const std::uint32_t node;
  const std::string name;  // for errors
  std::string route;       // "tcp, 10.0.0.2 4711": how it is reached
  // Other ranks of this host share memory with it, and may read its redo log.
  bool may_keep_log = false;
  TransportMemory& memory;
  SendQueue queue;
  LandingSlots slots;
  // Bytes that are sent before the loop looks at what has come.
  std::uint64_t most_per_turn = ~std::uint64_t{0};
  bool needs_buffer = false;  // waits for another staging buffer, which the next step() adds

 private:
  WorkerLoop& loop_;
  const std::uint32_t epoch_;
  void break_path(std::uint16_t id, const std::string& why);
  void send_keys(std::uint16_t lost, std::size_t rail, const ServerPath& other);
  void share();

  ServerPaths paths_;
  PushesBySlot pushes_;
  RailShares shares_;
  bool needs_slots_ = false;
  std::vector<std::uint64_t> rail_keys_;  // of the server's rails after the first, by slot number
  tensor::Landed landed_;
  std::shared_ptr<transport::shm::SharedMemory> log_memory_;
  std::optional<tensor::RedoLog> log_;
  std::size_t other_rails_ = 0;  // of the server
  std::uint64_t bytes_in_flight_ = 0;
  std::size_t in_flight_ = 0;
  bool answered_ = true;  // something, since is_stuck() was asked last
  Clock::time_point last_answer_{};
  bool heard_ = true;  // something, since silence() was asked last
  bool suspected_ = false;
  std::optional<Deadline> ends_by_;  // its process has been ended, and is not gone yet
  Clock::time_point word_expected_until_ = Clock::time_point::max();
  Clock::time_point silent_since_{};
  bool lost_ = false;
  bool reported_ = false;
  std::string why_lost_;
};

}  // namespace bps::worker
