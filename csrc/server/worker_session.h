// SPDX-License-Identifier: Apache-2.0
// Keeps what a server loop has of one loop of one worker: its connections, its landing slots, and the answers that wait
// for the send window.
//
// It is the sink of its endpoints. What arrives on the data plane goes straight to the round engine; control messages
// and losses go to the owner. Where it has several paths it survives the loss of all but one: see worker_paths.h. A
// session that was lost stays where it is, because rounds may still refer to it, but it sends nothing more. One thread
// uses it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/answers.h"
#include "server/slot_window.h"
#include "tensor/control_messages.h"
#include "transport/transport.h"
#include "van/membership.h"

namespace bps::server {

class RoundEngine;
class WorkerSession;

class SessionOwner {
 public:
  virtual void on_message(WorkerSession& from, std::span<const std::byte> message) = 0;
  // Is called when the worker cannot be reached any more, on any of its connections. It may be called from the data
  // path.
  virtual void on_lost(WorkerSession& session, const std::string& why) = 0;

 protected:
  ~SessionOwner() = default;
};

// Holds the objects that all sessions of a server loop share.
struct SessionContext {
  SessionOwner& owner;
  RoundEngine& rounds;
  SlotPool& pool;
  SendsDue& sends_due;
  Counters& counters;
  std::uint32_t epoch;
};

// Names the worker loop that a session serves.
struct Client {
  std::uint32_t node;
  std::uint32_t worker_rank;
  std::uint16_t worker_loop;
  std::string name;  // for errors
};

class WorkerSession final : public transport::ControlSink, public transport::DataSink {
 public:
  WorkerSession(const SessionContext& context, const van::Node& worker, std::uint16_t worker_loop,
                transport::Transport& transport);

  transport::Transport& transport() const { return transport_; }
  SlotWindow& window() { return window_; }
  TableShare& share() { return share_; }
  Answers& answers() { return answers_; }
  bool is_lost() const { return paths_.is_lost(); }

  // Returns true where this connection is one that the session lacks.
  bool may_accept(const transport::Hello& hello) const { return paths_.may_add(hello); }
  void accept(std::unique_ptr<transport::IncomingConnection> incoming);
  // Takes the worker's first message. Returns false if it came before.
  bool attach(const tensor::Attach& attach);

  void send(const tensor::ControlMessage& message);
  // Returns true where it has several paths. An answer then counts as written when the worker has confirmed it, and its
  // write has no token.
  bool fails_over() const { return paths_.fails_over(); }
  // Notes that the worker has received answers.
  void confirm(const tensor::Received& received);
  // Closes the paths by which the network carries nothing, as long as there are others.
  void check_paths();
  // Takes the keys by which the worker names memory for answers that take another path than their pushes. They come
  // before settle().
  void add_keys(const tensor::AnswerKeys& keys);
  // To be called when the worker has closed a path: replies, and sends by the other paths what has not arrived. Returns
  // the connections, which nobody needs any more.
  std::vector<transport::Endpoint*> settle(const tensor::PathLost& lost);
  // Returns access to memory that both share, or null where they share none.
  transport::DirectAccess* direct();

  // Sends an answer, now or when the send window has room again.
  void post(const Answer& answer) {
    if (!answers_.post(answer)) [[unlikely]]
      lose("it takes none of its answers");
  }
  // Returns true when the worker, or its system, has all that it was sent.
  bool is_flushed() const;
  void send_credits();

  void for_each_connection(const std::function<void(std::uint32_t, transport::DataEndpoint&)>& look) {
    if (is_lost()) return;
    for (const WorkerPath& path : paths_.all()) {
      for (const AnswerStream& stream : path.streams) look(client.node, *stream.data);
    }
  }

  // Tells the owner that the worker is lost, because its memory cannot be reached or for another reason.
  void lose(std::string_view why);
  // Keeps the worker from writing anything from now on, and sends nothing to it. With `keep_control` what was sent on
  // its control endpoint before is still delivered.
  void abandon(bool keep_control) { paths_.abandon(keep_control); }
  // Gives up what waits to be sent to a worker that is lost, and takes its landing slots back.
  void discard();

  std::size_t allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                           std::uint32_t immediate) override;
  void on_write(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) override;
  void on_posting(transport::DataEndpoint& from, std::span<const std::byte> header,
                  const transport::RemoteSpan& span) override;
  void on_written(transport::DataEndpoint& to, std::uint64_t token) override;
  void on_message(transport::ControlEndpoint& from, std::span<const std::byte> message) override;
  void on_lost(transport::Endpoint& peer, const std::string& why) override;

  const Client client;

 private:
  void break_path(WorkerPath& path, const std::string& why);

  const SessionContext context_;
  transport::Transport& transport_;
  SlotWindow window_;
  TableShare share_;
  WorkerPaths paths_;
  Answers answers_;
  bool attached_ = false;
};

using Sessions = std::vector<std::unique_ptr<WorkerSession>>;
// Returns the session of a worker's loop that is not lost, or nullptr.
WorkerSession* find_session(const Sessions& sessions, std::uint32_t worker_rank, std::uint16_t worker_loop);

}  // namespace bps::server
