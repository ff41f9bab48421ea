// One push loop and its pull loop: the worker's end of the walk, on one thread.
//
// [4] push: takes the most urgent partition for each server that has room, and writes it into a landing slot, or
// descriptors it in place to a server on the same host. [6] pull: an answer's immediate names the partition that is
// over; the bytes already lie in the user's tensor. Both run to completion here, so nothing is handed between threads
// but the operation itself, once on its way in (a bounded ring) and once when its caller wakes.
//
// Every server has a queue and credits of its own, so a server that is busy never holds up another. Threading: submit()
// from any thread, everything else on the reactor's.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/metrics.h"
#include "core/ring.h"
#include "tensor/control_messages.h"
#include "tensor/push_header.h"
#include "transport/reactor.h"
#include "transport/region_cache.h"
#include "worker/operation.h"
#include "worker/send_queue.h"
#include "worker/staging.h"

namespace bps::worker {

struct WorkerLoopOptions {
  std::size_t index = 0;
  std::size_t servers = 1;              // places: loops of servers in the job
  std::uint64_t scheduling_credit = 0;  // bytes in entry; 0: no limit
  std::uint64_t largest_partition = 0;
  std::uint64_t staging_bytes = 0;
};

class WorkerLoop;

// The connection of a worker loop to one loop of one server: the sink of its endpoints.
class ServerConnection final : public transport::ControlSink, public transport::DataSink {
 public:
  ServerConnection(WorkerLoop& of, std::uint32_t server_rank, std::string server_name, transport::Transport* by,
                   transport::RegionCache* cache)
      : loop(of), rank(server_rank), name(std::move(server_name)), transport(by), regions(cache) {}

  void on_write(transport::DataEndpoint& from, std::uint32_t immediate) override;
  void on_descriptor(transport::DataEndpoint& from, std::span<const std::byte> header,
                     const transport::RemoteSpan& span) override;
  void on_written(transport::DataEndpoint&, std::uint64_t) override {}
  void on_message(transport::ControlEndpoint& from, std::span<const std::byte> message) override;
  void on_lost(transport::Endpoint& peer, const std::string& why) override;

  bool is_stuck();
  void take(const tensor::SlotCredit& slot) {
    (tensor::is_small_slot(slot.capacity) ? small_slots : large_slots).push_back(slot);
  }

  WorkerLoop& loop;
  const std::uint32_t rank;
  const std::string name;  // for errors
  transport::Transport* const transport;
  transport::RegionCache* const regions;
  transport::ControlEndpoint* control = nullptr;
  std::vector<transport::DataEndpoint*> data;
  std::size_t next_data = 0;  // round robin over the data endpoints
  std::vector<tensor::SlotCredit> small_slots;
  std::vector<tensor::SlotCredit> large_slots;
  SendQueue queue;
  std::uint64_t bytes_in_flight = 0;
  bool landed = true;  // something, since somebody asked last
  Clock::time_point last_landing{};
  bool lost = false;
  std::string why_lost;  // a sentence, once it is known
};

class WorkerLoop final : public transport::Actor {
 public:
  WorkerLoop(WorkerLoopOptions options, transport::Reactor& reactor);
  ~WorkerLoop();

  // Set-up, on the reactor's thread: the sink for the endpoints of a connection; then they are known and it opens.
  ServerConnection& add_server(std::size_t place, std::uint32_t rank, std::string name,
                               transport::Transport* transport);
  void open(ServerConnection& server);

  // From any thread; wake() the reactor's progress, or drive it, next. kTimeout when the worker_loop does not keep up
  // with the submissions.
  void submit(const std::shared_ptr<Operation>& operation, bool watches_deadline);

  // On the reactor's thread: fail every operation that `concerns` says so of.
  void fail_operations(const std::function<bool(const Operation&)>& concerns, ErrorCode code, const std::string& what,
                       const std::string& hint);
  // `why` is a sentence that names the cause.
  void lose_server(std::uint32_t rank, const std::string& why);
  void forget_memory(std::uint64_t identity);

  bool step() override;
  bool arm() override { return submissions_.empty(); }
  bool blocked() const override { return blocked_; }

  // From the connections.
  void on_write(ServerConnection& server, std::uint32_t immediate);
  void on_descriptor();
  void on_message(ServerConnection& server, std::span<const std::byte> message);
  void on_lost(ServerConnection& server, const std::string& why);

  // Called once when a server's connection breaks: answer with lose_server(), soon. Set before the reactor starts.
  // Without it the operations of that server fail at once.
  std::function<void(std::uint32_t server_rank, const std::string& why)> when_lost;

 private:
  // A partition on its way: from the push until its answer. Its index and generation are the answer's immediate.
  struct InFlight {
    Operation* operation = nullptr;  // null: free
    ServerConnection* server = nullptr;
    std::uint32_t partition = 0;
    std::uint8_t generation = 0;
    std::uint64_t length = 0;
    std::byte* stage = nullptr;    // the copy that the server works on, when it cannot reach the tensor
    transport::RegionPtr input{};  // held while the server may touch them
    transport::RegionPtr output{};
  };
  struct Submission {
    std::shared_ptr<Operation> operation;
    bool watches_deadline = false;
  };
  // Partitions that go out with one doorbell.
  struct Batch {
    static constexpr std::size_t kMost = 16;
    std::array<tensor::PushHeader, kMost> headers;
    std::array<transport::WriteOp, kMost> writes;
    std::array<transport::Descriptor, kMost> descriptors;
    std::array<tensor::SlotCredit, kMost> slots;
    std::array<std::uint32_t, kMost> entries;
    std::array<Operation::Cursor*, kMost> cursors;
    std::size_t size = 0;
  };

  bool take_submissions();
  bool push(ServerConnection& server);
  bool prepare(ServerConnection& server, Operation::Cursor& cursor, Batch& batch);
  std::size_t post(ServerConnection& server, Batch& batch);
  void undo(ServerConnection& server, Batch& batch, std::size_t from);
  std::uint32_t allocate();
  void complete(std::uint32_t index);
  InFlight* find(std::uint32_t immediate, const ServerConnection* server);
  static void sever(ServerConnection& server);
  void lose(ServerConnection& server, const std::string& why);
  void finish(Operation& operation, std::uint64_t partitions);
  void check_deadlines();
  void purge();

  const WorkerLoopOptions options_;
  Counters& counters_;
  MpscRing<Submission> submissions_;
  std::vector<std::unique_ptr<ServerConnection>> servers_;  // by place; null where this worker_loop has no business
  std::vector<std::unique_ptr<transport::RegionCache>> caches_;  // one per transport
  std::vector<transport::Transport*> cached_transports_;
  std::vector<InFlight> in_flight_;
  std::vector<std::uint32_t> free_entries_;
  Timer deadline_check_;
  // Bytes that may be under way to one server: an equal share of the scheduling credit, so that what is less urgent on
  // one server never takes the credit of what is more urgent on another. 0: no limit.
  std::uint64_t credit_ = 0;
  std::vector<std::shared_ptr<Operation>> watched_;  // operations whose deadline this worker_loop watches
  std::size_t purge_at_ = 64;
  std::unique_ptr<Staging> staging_;  // made at first need
  Batch batch_;                       // of push(); here, because emptying 4 KiB each time would cost as much as a push
  bool has_work_ = false;
  bool blocked_ = false;
};

}  // namespace bps::worker
