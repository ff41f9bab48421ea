// The control side of a worker_loop: servers, submissions, deadlines, failures. The hot part is lane_data_path.cc.
#include "worker/worker_loop.h"

#include <algorithm>
#include <utility>

#include "core/log.h"

namespace bps::worker {
namespace {

constexpr const char* kRestart = "restart the job from its last checkpoint";
constexpr std::size_t kSubmissions = 1 << 14;  // operations on their way into a worker_loop; callers wait beyond
constexpr std::size_t kCachedRegions = 4096;   // per transport; an entry is a table row except on a NIC
constexpr double kDeadlineCheck_s = 0.25;
constexpr double kAnswerGrace_s = 1.0;  // for the server to say who is missing

}  // namespace

WorkerLoop::WorkerLoop(WorkerLoopOptions options, transport::Reactor& reactor)
    : options_(options), counters_(reactor.counters()), submissions_(kSubmissions), servers_(options.servers) {
  deadline_check_ = reactor.loop().every(kDeadlineCheck_s, [this] { check_deadlines(); });
}

// Whoever still waits learns that nobody will complete it.
WorkerLoop::~WorkerLoop() {
  fail_operations([](const Operation&) { return true; }, ErrorCode::kNotInitialized,
                  "bps_rdma was shut down before it was complete", "wait for your handles before shutdown()");
}

void ServerConnection::on_message(transport::ControlEndpoint&, std::span<const std::byte> message) {
  loop.on_message(*this, message);
}
void ServerConnection::on_lost(transport::Endpoint&, const std::string& why) {
  loop.on_lost(*this, why);
}

ServerConnection& WorkerLoop::add_server(std::size_t place, std::uint32_t rank, std::string name,
                                         transport::Transport* transport) {
  const auto known = std::ranges::find(cached_transports_, transport);
  const auto cache = static_cast<std::size_t>(known - cached_transports_.begin());
  if (known == cached_transports_.end()) {
    cached_transports_.push_back(transport);
    caches_.push_back(std::make_unique<transport::RegionCache>(*transport, kCachedRegions));
  }
  servers_[place] = std::make_unique<ServerConnection>(*this, rank, std::move(name), transport, caches_[cache].get());
  return *servers_[place];
}

void WorkerLoop::open(ServerConnection& server) {
  const bool needs_slots = server.data.front()->direct() == nullptr;
  const auto count = static_cast<std::uint8_t>(server.data.size());  // BPS_TCP_STREAMS and the like: 64 at most
  (void)server.control->send(encode(tensor::Attach{options_.largest_partition, needs_slots, count}));
  const auto met = std::ranges::count_if(servers_, [](const auto& one) { return one != nullptr; });
  credit_ = (options_.scheduling_credit + static_cast<std::uint64_t>(met) - 1) / static_cast<std::uint64_t>(met);
}

void WorkerLoop::submit(const std::shared_ptr<Operation>& operation, bool watches_deadline) {
  Submission submission{operation, watches_deadline};
  while (!submissions_.push(std::move(submission))) {
    if (operation->deadline.passed()) {
      throw Error(ErrorCode::kTimeout, operation->describe() + ": too many operations are waiting to start",
                  "wait for earlier operations before starting more");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // 16,384 operations ahead of us: not the data path
  }
}

bool WorkerLoop::take_submissions() {
  Submission submission;
  bool found = false;
  while (submissions_.pop(submission)) {
    found = true;
    Operation& operation = *submission.operation;
    std::uint64_t nothing_to_do = 1;  // the worker_loop's own share: it has taken the operation in
    for (std::size_t place = 0; place < servers_.size(); ++place) {
      Operation::Cursor& cursor = operation.cursors[options_.index * servers_.size() + place];
      if (cursor.partitions->empty()) continue;
      ServerConnection* server = servers_[place].get();
      if (!server->why_lost.empty()) {
        operation.fail(ErrorCode::kPeerLost, server->why_lost, kRestart);
      }
      if (operation.done()) {
        nothing_to_do += cursor.partitions->size();
        continue;
      }
      server->queue.add(&cursor);
      has_work_ = true;
    }
    if (submission.watches_deadline) watched_.push_back(submission.operation);
    finish(operation, nothing_to_do);
  }
  if (watched_.size() >= purge_at_) purge();
  return found;
}

// Drops what is over. Amortised: the list is walked when it has doubled, and by the timer.
void WorkerLoop::purge() {
  std::erase_if(watched_, [](const auto& operation) { return operation->over(); });
  purge_at_ = std::max<std::size_t>(64, 2 * watched_.size());
}

void WorkerLoop::check_deadlines() {
  purge();
  for (const auto& operation : watched_) {
    if (operation->done() || !operation->deadline.passed()) continue;
    const auto late = Clock::now() - operation->deadline.at();
    if (!operation->asked.exchange(true)) {
      // Ask a server that still owes an answer who is missing; its reply fails the operation with their names.
      for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
        const InFlight& entry = in_flight_[i];
        if (entry.operation != operation.get() || entry.server->lost) continue;
        const std::uint32_t immediate = i | std::uint32_t{entry.generation} << 24;
        (void)entry.server->control->send(
            encode(tensor::WhoIsMissing{immediate, operation->tensor->id, entry.partition, operation->round}));
        break;
      }
    } else if (late > std::chrono::duration<double>(kAnswerGrace_s)) {
      operation->fail(ErrorCode::kTimeout, "not complete within " + std::to_string(operation->request.timeout_s) + " s",
                      "check that every rank of the group calls it, or raise BPS_TIMEOUT");
    }
  }
}

void WorkerLoop::on_message(ServerConnection& server, std::span<const std::byte> message) {
  const auto decoded = tensor::decode_control_message(message);
  if (!decoded) {
    counters_.stale.add();
    return;
  }
  if (const auto* credits = std::get_if<tensor::Credits>(&*decoded)) {
    for (const tensor::SlotCredit& slot : credits->slots) server.take(slot);
    has_work_ = true;
  } else if (const auto* failed = std::get_if<tensor::PushFailed>(&*decoded)) {
    if (failed->immediate == tensor::kWholeSession) return on_lost(server, failed->what + " (" + failed->hint + ")");
    InFlight* entry = find(failed->immediate, &server);
    if (entry == nullptr) return;
    const auto code = failed->code <= static_cast<std::uint8_t>(ErrorCode::kInternal)
                          ? static_cast<ErrorCode>(failed->code)
                          : ErrorCode::kInternal;
    entry->operation->fail(code, failed->what, failed->hint);
    complete(failed->immediate & 0xffffff);
  } else if (const auto* missing = std::get_if<tensor::Missing>(&*decoded)) {
    InFlight* entry = find(missing->immediate, &server);
    if (entry == nullptr) return;
    std::string ranks;
    for (const std::uint32_t rank : missing->ranks) ranks += (ranks.empty() ? " " : ", ") + std::to_string(rank);
    entry->operation->fail(ErrorCode::kTimeout,
                           "after " + std::to_string(static_cast<int>(entry->operation->request.timeout_s)) + " s " +
                               server.name + " still waits for rank" +
                               (ranks.empty() ? "s it knows nothing of" : ranks),
                           "check that those ranks are alive and call the same operation, or raise BPS_TIMEOUT");
  }
}

void WorkerLoop::fail_operations(const std::function<bool(const Operation&)>& concerns, ErrorCode code,
                                 const std::string& what, const std::string& hint) {
  take_submissions();
  for (const auto& operation : watched_) {
    if (!operation->done() && concerns(*operation)) operation->fail(code, what, hint);
  }
}

void WorkerLoop::lose_server(std::uint32_t rank, const std::string& why) {
  for (const auto& server : servers_) {
    if (server && server->rank == rank && server->why_lost.empty()) lose(*server, why);
  }
}

// From the return on the server cannot write into our memory any more, even if it still runs.
void WorkerLoop::sever(ServerConnection& server) {
  if (std::exchange(server.lost, true)) return;
  for (transport::DataEndpoint* endpoint : server.data) endpoint->abandon();
  server.control->abandon();
}

void WorkerLoop::lose(ServerConnection& server, const std::string& why) {
  sever(server);
  server.why_lost = why;
  const auto fail = [&](Operation& operation) { operation.fail(ErrorCode::kPeerLost, why, kRestart); };
  for (Operation::Cursor* cursor : server.queue.take_all()) {
    fail(*cursor->operation);
    finish(*cursor->operation, cursor->partitions->size() - cursor->next);
  }
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    if (in_flight_[i].operation == nullptr || in_flight_[i].server != &server) continue;
    fail(*in_flight_[i].operation);
    complete(i);
  }
}

void WorkerLoop::finish(Operation& operation, std::uint64_t partitions) {
  if (!operation.finish(partitions)) return;
  // Counted before anybody can see that it is over: who has waited for it finds it in the counters.
  if (operation.done()) {
    counters_.failed.add();
  } else {
    counters_.operations.add();
    counters_.operation_bytes.add(operation.bytes());
  }
  operation.end();
}

void WorkerLoop::on_lost(ServerConnection& server, const std::string& why) {
  if (server.lost) return;
  if (!when_lost) return lose(server, server.name + " is lost: " + why);
  // Operations wait until lose_server() tells the cause, which may be the loss of another member.
  sever(server);
  when_lost(server.rank, why);
}

void WorkerLoop::forget_memory(std::uint64_t identity) {
  for (const auto& cache : caches_) cache->forget(identity);
}

}  // namespace bps::worker
