// One loop of a server: it sees a push, sums when the last one is there, and posts the answers. Nobody else is
// involved.
//
// The walk: [8] a push lands in a slot (or is posted in place) -> check() -> take() -> [9] sum() when the group is
// complete -> [10] answer(). Landing slots are credits: a worker may fill the slots it was given, and gets each one
// back when its bytes have been summed.
//
// Different orders: workers may push in any order. When every worker that a round still waits for has used up its slots
// on other rounds, nothing would ever move again; exactly then those workers get one slot beyond their window (see
// grant_overflow()). So memory is bounded by the windows unless the orders really differ, and then grows by what they
// differ.
//
// Threading: belongs to its reactor's thread. Errors: a push that cannot be summed is answered with PushFailed and
// counted; the server goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "core/metrics.h"
#include "server/round_table.h"
#include "server/slot_pool.h"
#include "server/sum.h"
#include "tensor/control_messages.h"
#include "transport/reactor.h"
#include "van/membership.h"

namespace bps::server {

class ServerLoop;

// One loop of one worker, as this server loop sees it: the sink of its endpoints.
class WorkerSession final : public transport::ControlSink, public transport::DataSink {
 public:
  struct Answer {
    transport::WriteOp op{};
    transport::DataEndpoint* data = nullptr;
    Round* round = nullptr;  // whose result slot the write reads; null for a bare immediate
  };

  WorkerSession(ServerLoop& of, const van::Node& worker, std::uint16_t worker_loop, transport::Transport* by);

  void on_write(transport::DataEndpoint& from, std::uint32_t immediate) override;
  void on_descriptor(transport::DataEndpoint& from, std::span<const std::byte> header,
                     const transport::RemoteSpan& span) override;
  void on_written(transport::DataEndpoint& to, std::uint64_t token) override;
  void on_message(transport::ControlEndpoint& from, std::span<const std::byte> message) override;
  void on_lost(transport::Endpoint& peer, const std::string& why) override;

  ServerLoop& loop;
  const std::uint32_t node;
  const std::uint16_t worker_loop;
  const std::uint32_t worker_rank;
  const std::string name;  // for errors
  transport::Transport* const transport;
  transport::ControlEndpoint* control = nullptr;
  std::vector<transport::DataEndpoint*> data;
  std::size_t data_endpoints = 64;  // no more than these; known exactly once it is attached
  bool attached = false;
  bool needs_slots = false;
  bool lost = false;
  bool rejected = false;  // by us; the control endpoint still has to say so
  std::uint64_t largest_payload = 0;
  std::uint32_t free_small = 0;  // slots the worker holds and has not filled yet
  std::uint32_t free_large = 0;
  std::vector<tensor::SlotCredit> credits;  // for the next message
  std::vector<Answer> answers;              // waiting for the send window
};

struct ServerLoopOptions {
  std::uint32_t window = 8;       // large landing slots per worker loop, at most
  std::uint64_t slot_memory = 0;  // bytes for the slots of all workers; fewer each when they are many; 0: no limit
  std::uint64_t largest_partition = 0;  // bytes; refuses more
};

class ServerLoop final : public transport::Actor {
 public:
  ServerLoop(ServerLoopOptions options, van::Membership membership, std::vector<transport::Transport*> slot_transports,
             Counters& counters);

  // A worker's connection, by `transport`: accepts it, or rejects it with a line in the log. Throws what accepting
  // does.
  void accept(std::unique_ptr<transport::IncomingConnection> incoming, transport::Transport* transport);
  void add_group(const van::Group& group);
  // The worker is gone: its rounds can never complete. Takes effect in the next step().
  void lose_node(std::uint32_t node);

  bool step() override;
  bool blocked() const override { return blocked_; }

  // From the sessions.
  void on_write(WorkerSession& session, transport::DataEndpoint& from, std::uint32_t immediate);
  void on_descriptor(WorkerSession& session, transport::DataEndpoint& from, std::span<const std::byte> header,
                     const transport::RemoteSpan& span);
  void on_written(std::uint64_t round);
  void on_message(WorkerSession& session, std::span<const std::byte> message);
  void on_lost(WorkerSession& session, const std::string& why);

  std::uint64_t slot_bytes() const { return pool_.bytes(); }
  std::size_t open_rounds() const { return table_.open().size(); }

 private:
  WorkerSession* admit(const transport::Hello& hello, transport::Transport* transport);
  void attach(WorkerSession& session, const tensor::Attach& attach);
  void grant(WorkerSession& session, Slot* slot);
  void release(Slot* slot);
  void grant_overflow(const Round& round);
  void grant_overflows();
  bool starved(const WorkerSession& session) const;
  WorkerSession* session_of(std::uint32_t worker_rank, std::uint16_t worker_loop);

  void take(WorkerSession& session, transport::DataEndpoint& from, const tensor::PushHeader& header, Slot* slot,
            const transport::RemoteSpan& span);
  bool check(WorkerSession& session, const tensor::PushHeader& header, const Slot* slot,
             const transport::RemoteSpan& span);
  bool agrees(Round& round, WorkerSession& session, const tensor::PushHeader& header);
  bool keep(Arrival& arrival);
  void sum(Round& round);
  void answer(Round& round, Arrival& arrival, bool in_place);
  void close_if_over(Round& round);
  void post(WorkerSession& session, WorkerSession::Answer answer);
  static void send_credits(WorkerSession& session);

  void reject(WorkerSession& session, const Error& error);
  void refuse(WorkerSession& session, const tensor::PushHeader& header, ErrorCode code, const std::string& what,
              const std::string& hint);
  void fail(Round& round, ErrorCode code, const std::string& what, const std::string& hint);
  void drop(Round& round);
  void forget_lost();
  void tell_missing(WorkerSession& session, const tensor::WhoIsMissing& question);

  const ServerLoopOptions options_;
  const van::Membership membership_;
  Counters& counters_;
  SlotPool pool_;
  RoundTable table_;
  Summer summer_;
  std::unordered_map<std::uint32_t, van::Group> groups_;
  std::unordered_set<std::uint32_t> lost_ranks_;
  bool losses_due_ = false;
  std::vector<std::unique_ptr<WorkerSession>> sessions_;
  bool credits_due_ = false;
  bool answers_due_ = false;
  bool blocked_ = false;
  std::vector<SumSource> sources_;  // of the pass in progress; kept for their capacity
  std::vector<SumTarget> targets_;
  std::vector<bool> placed_;
};

}  // namespace bps::server
