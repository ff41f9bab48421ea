// SPDX-License-Identifier: Apache-2.0
#include "worker/worker_loop.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/log.h"

namespace bps::worker {
namespace {

constexpr double kDeadlineCheck_s = 0.25;
constexpr std::uint64_t kOwnTurnBytes = 256 << 10;  // some 100 us of summing

}  // namespace

WorkerLoop::WorkerLoop(WorkerLoopOptions options, transport::Reactor& reactor)
    : options_(std::move(options)),
      reactor_(reactor),
      connections_(options_.places, options_.largest_partition, options_.staging_bytes),
      partitions_(reactor.counters()),
      watch_(options_.silence_s),
      cancellation_(options_.index, connections_, partitions_, watch_, reactor.counters(), events),
      copies_(reactor, connections_, partitions_, cancellation_),
      relay_(options_.largest_partition, connections_, cancellation_, contributions_, reactor.counters()),
      losses_(reactor, connections_, partitions_, cancellation_, contributions_, copies_, events),
      receiver_(options_.epoch, options_.name,
                {connections_, partitions_, watch_, cancellation_, losses_, contributions_, copies_},
                reactor.counters()),
      admission_(reactor, connections_, cancellation_, copies_, options_.gpudirect),
      sender_(partitions_.table, reactor.counters(), options_.epoch) {
  timers_.push_back(reactor.loop().every(kDeadlineCheck_s, [this] { check_deadlines(); }));
}

// The process has waited until this loop is idle, for as long as servers may take to acknowledge. What is still under
// way now ends here. Its callers get their memory back when no server can write to it any more.
WorkerLoop::~WorkerLoop() {
  contributions_.set_source(nullptr);
  events.when_failing = nullptr;
  abort_operations([](const Operation&) { return true; }, ErrorCode::kNotInitialized,
                   "bps_rdma was shut down before it was complete", "wait for your handles before shutdown()");
  // All servers that have to be ended end at once.
  for (bool again = true; again;) {
    again = false;
    for (ServerConnection* server : connections_.all()) {
      if (server->paths.streams().empty()) continue;
      losses_.end_all_of(*server);
      again |= server->loss.is_ending();
    }
    if (again) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  copies_.end();
}

bool WorkerLoop::is_idle() const {
  return admission_.is_empty() &&
         std::ranges::all_of(watched_, [](const auto& operation) { return operation->is_over(); });
}

// ---- Set-up

ServerConnection& WorkerLoop::add_server(std::size_t place, std::uint32_t node, std::string name,
                                         transport::Transport& transport) {
  return connections_.add(place, receiver_, {node, std::move(name), options_.epoch, options_.silence_s}, transport);
}

void WorkerLoop::open(ServerConnection& server, std::vector<ServerPath> paths) {
  const auto count = static_cast<std::uint8_t>(paths.front().data.size());  // BPS_TCP_STREAMS and the like: at most 64
  server.open(std::move(paths));
  if (server.paths.fails_over() && timers_.size() == 1) {
    timers_.push_back(reactor_.loop().every(transport::kPathCheck_s, [this] { check_paths(); }));
  }
  const bool wants_log = options_.survives_servers && !server.needs_slots();
  (void)server.send(tensor::Attach{options_.largest_partition, server.needs_slots(), count, wants_log});
  // Each server gets an equal share of the budget, so that what is less urgent on one server never takes the share of
  // what is more urgent on another.
  const std::uint64_t met = connections_.all().size();
  sender_.set_budget((options_.scheduling_credit + met - 1) / met);
  // The server of this process sums in the order in which it gets the pushes. They need no time on their way, so that a
  // few at a time are enough, and what is urgent overtakes the rest of the budget.
  if (options_.scheduling_credit > 0 && server.memory.transport().kind() == transport::Kind::kSelf) {
    server.queue.most_per_turn = kOwnTurnBytes;
  }
}

void WorkerLoop::add_path(ServerConnection& server, ServerPath path) {
  log_info("a connection to " + server.name + " that was lost is back");
  server.add_path(std::move(path));
}

// ---- Turns

bool WorkerLoop::step() {
  bool found = take_submissions();
  if (copies_.is_used()) found |= copies_.step();
  if (connections_.owes_words()) connections_.send_words();
  if (!connections_.take_work()) return found;
  for (ServerConnection* server : connections_.all()) {
    if (!server->is_closed()) found |= serve(*server);
  }
  return found;
}

bool WorkerLoop::take_submissions() {
  Admission::Submission submission;
  bool found = false;
  while (admission_.take(submission)) {
    found = true;
    Operation& operation = *submission.operation;
    admission_.admit(operation);
    if (submission.watches_deadline) watched_.add(submission.operation);
    if (operation.is_failing()) cancellation_.cancel(operation);
    finish(operation, 1, reactor_.counters());  // the loop's own share: it has admitted the operation
  }
  return found;
}

// Sends one server what there is room for.
bool WorkerLoop::serve(ServerConnection& server) {
  bool found = false;
  if (!server.pushes.repeats.empty()) {
    found = sender_.repeat(server);
    if (!server.pushes.repeats.empty()) connections_.note_blocked();
  }
  if (server.queue.empty()) return found;
  found |= sender_.push(server);
  if (const auto [broken, why] = sender_.take_broken(); why == Status::kCodec) {
    cancellation_.abort(*broken, server, receiver_.codec_failure());
  } else if (broken != nullptr) {
    // A rank of this host is lost, and its rounds know that. This one ends when the cause is known.
    server.queue.remove(broken);
  }
  if (server.queue.empty()) return found;
  connections_.note_blocked();
  if (server.queue.needs_buffer != nullptr && !server.memory.has_free()) admission_.add_buffer(server);
  return found;
}

// ---- What fails

void WorkerLoop::abort_operations(const std::function<bool(const Operation&)>& concerns, ErrorCode code,
                                  const std::string& what, const std::string& hint) {
  take_submissions();
  const Error why(code, what, hint);
  const std::vector<std::shared_ptr<Operation>> watched(watched_.begin(), watched_.end());
  for (const auto& operation : watched) {
    if (!operation->is_done() && concerns(*operation)) cancellation_.abort(*operation, why);
  }
}

void WorkerLoop::leave(const Error& why) {
  admission_.end(why);
  abort_operations([](const Operation&) { return true; }, why.code(), why.what(), why.hint());
}

void WorkerLoop::end_view(const Error& why) {
  connections_.end_view(why);
  contributions_.end_view(why);
  abort_operations([](const Operation&) { return true; }, why.code(), why.what(), why.hint());
  losses_.end_view(why);
}

void WorkerLoop::on_reachable(std::uint32_t node) {
  for (ServerConnection* server : connections_.all()) {
    if (server->node == node) server->silence.note_reachable(Clock::now());
  }
}

void WorkerLoop::check_paths() {
  for (ServerConnection* server : connections_.all()) {
    if (server->paths.fails_over()) server->check_paths();
  }
}

void WorkerLoop::check_deadlines() {
  watched_.purge();
  const std::vector<std::shared_ptr<Operation>> watched(watched_.begin(), watched_.end());
  for (const auto& operation : watched) {
    if (operation->is_done() || operation->is_failing()) continue;
    if (operation->completion.is_given_up()) {
      cancellation_.abort(*operation, Error(ErrorCode::kPeerLost, kInterrupted, kCallAgain));
    } else if (operation->deadline.passed()) {
      cancellation_.abort(
          *operation,
          Error(ErrorCode::kTimeout, "not complete within " + in_words(operation->request.timeout_s), kRaiseTimeout));
    }
  }
  if (events.when_checked) events.when_checked(watched_.first());
  for (const ReplyWatch::Overdue& late : watch_.check(partitions_.table, connections_, events.when_silent)) {
    if (!late.server->loss.is_known()) losses_.report(*late.server, late.why);
  }
  losses_.end_due();
  copies_.check();
  connections_.drop_freed_of_devices();
}

}  // namespace bps::worker
