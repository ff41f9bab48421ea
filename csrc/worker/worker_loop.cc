// SPDX-License-Identifier: Apache-2.0
#include "worker/worker_loop.h"

#include <algorithm>
#include <thread>

namespace bps::worker {
namespace {

constexpr std::size_t kSubmissions = 1 << 14;  // operations on their way into a loop; callers wait beyond
constexpr double kDeadlineCheck_s = 0.25;
// A server reads and writes memory that it cannot map by two system calls for each partition. For small tensors two
// copies by the worker take less time. Measured: at 256 KiB staging takes less than half the time, at 1 MiB as long,
// because the copies fill the cache.
constexpr std::uint64_t kLargestStagedIfCheap = 256 << 10;
constexpr std::size_t kMostStagedIfCheap = 16;  // buffers; without a free one partitions do not wait, and go in place
constexpr std::uint64_t kOwnTurnBytes = 256 << 10;  // some 100 us of summing

}  // namespace

WorkerLoop::WorkerLoop(WorkerLoopOptions options, transport::Reactor& reactor)
    : options_(options),
      reactor_(reactor),
      counters_(reactor.counters()),
      submissions_(kSubmissions),
      servers_(options.places),
      sender_(in_flight_, counters_, options_.epoch) {
  deadline_check_ = reactor.loop().every(kDeadlineCheck_s, [this] { check_deadlines(); });
}

// Whoever shuts down has waited until this loop is idle, for as long as servers may take to acknowledge. What is still
// under way now ends here: its callers get their memory back when no server can write to it any more.
WorkerLoop::~WorkerLoop() {
  contributions_.set_source(nullptr);
  when_failing = nullptr;
  abort_operations([](const Operation&) { return true; }, ErrorCode::kNotInitialized,
                   "bps_rdma was shut down before it was complete", "wait for your handles before shutdown()");
  // All that have to be ended end at once.
  for (bool again = true; again;) {
    again = false;
    for (const auto& server : servers_) {
      if (!server || !server->is_open()) continue;
      end_all_of(*server);
      again |= server->loss.is_ending();
    }
    if (again) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool WorkerLoop::is_idle() const {
  return submissions_.empty() && std::ranges::all_of(watched_, [](const auto& operation) { return operation->over(); });
}

std::vector<OpenPartition> WorkerLoop::list_open(std::size_t most) const {
  std::vector<OpenPartition> list;
  const auto add = [&](const Transfer& transfer, const Part& part, const ServerConnection& server, bool is_sent) {
    OpenPartition one;
    one.group = transfer.header->group;
    one.tensor = transfer.header->tensor;
    one.round = transfer.header->round;
    one.partition = part.partition;
    one.server = server.name;
    one.is_sent = is_sent;
    if (transfer.operation != nullptr) {
      one.operation = transfer.operation->describe();
      one.name = transfer.operation->tensor->name;
      one.left_ms = transfer.operation->deadline.left_ms();
      one.since_ms = transfer.operation->age_ms();
    }
    list.push_back(std::move(one));
  };
  for (std::uint32_t i = 0; i < in_flight_.size() && list.size() < most; ++i) {
    const InFlight& entry = in_flight_[i];
    if (entry.transfer != nullptr) add(*entry.transfer, entry.part, *entry.server, true);
  }
  for (const auto& server : servers_) {
    if (!server) continue;
    for (const Transfer* transfer : server->queue.all()) {
      const auto unsent = transfer->parts.subspan(transfer->next);
      for (std::size_t i = 0; i < unsent.size() && list.size() < most; ++i) add(*transfer, unsent[i], *server, false);
    }
  }
  return list;
}

// ---- Set-up

ServerConnection& WorkerLoop::add_server(std::size_t place, std::uint32_t node, std::string name,
                                         transport::Transport& transport) {
  auto known = std::ranges::find_if(memory_, [&](const auto& one) { return &one->transport() == &transport; });
  if (known == memory_.end()) {
    known = memory_.insert(
        known, std::make_unique<TransportMemory>(transport, options_.largest_partition, options_.staging_bytes));
  }
  servers_[place] = std::make_unique<ServerConnection>(
      *this, ServerConnection::Server{node, std::move(name), options_.epoch, options_.silence_s}, **known);
  return *servers_[place];
}

void WorkerLoop::open(ServerConnection& server, std::vector<ServerPath> paths) {
  const auto count = static_cast<std::uint8_t>(paths.front().data.size());  // BPS_TCP_STREAMS and the like: at most 64
  server.open(std::move(paths));
  if (server.paths.fails_over() && !path_check_) {
    path_check_ = reactor_.loop().every(transport::kPathCheck_s, [this] { check_paths(); });
  }
  const bool wants_log = options_.two_phase && !server.needs_slots();
  (void)server.send(tensor::Attach{options_.largest_partition, server.needs_slots(), count, wants_log});
  // Each server gets an equal share of the scheduling credit, so that what is less urgent on one server never takes the
  // credit of what is more urgent on another.
  const auto met =
      static_cast<std::uint64_t>(std::ranges::count_if(servers_, [](const auto& one) { return one != nullptr; }));
  sender_.set_credit((options_.scheduling_credit + met - 1) / met);
  // The server of this process sums in the order in which it gets the pushes. They need no time on their way, so that a
  // few at a time are enough, and what is urgent overtakes the rest of the credit.
  if (options_.scheduling_credit > 0 && server.memory.transport().name() == "self") {
    server.queue.most_per_turn = kOwnTurnBytes;
  }
}

void WorkerLoop::forget_memory(std::uint64_t identity) {
  for (const auto& memory : memory_) memory->regions.forget(identity);
}

// ---- Operations come in

void WorkerLoop::submit(const std::shared_ptr<Operation>& operation, bool watches_deadline) {
  Submission submission{operation, watches_deadline};
  while (!submissions_.push(std::move(submission))) {  // NOLINT(bugprone-use-after-move): a full ring leaves it alone
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
    for (std::size_t place = 0; place < servers_.size(); ++place) {
      Portion& portion = operation.portions[options_.index * servers_.size() + place];
      if (!portion.parts.empty()) admit(portion, *servers_[place]);
    }
    if (submission.watches_deadline) watched_.add(submission.operation);
    if (operation.is_failing()) cancel(operation);
    finish(operation, 1, counters_);  // the loop's own share: it has admitted the operation
  }
  return found;
}

// Everything that can fail happens here, before the operation enters the send queue. One that fails stays out of it.
void WorkerLoop::admit(Portion& portion, ServerConnection& server) {
  Operation& operation = *portion.operation;
  if (server.loss.is_known()) {
    const Error why = loss(server.loss.why());
    abort(operation, why.code(), why.what(), why.hint());
  }
  if (operation.is_failing()) return;
  try {
    prepare(portion, server);
  } catch (const Error& error) {
    return abort(operation, error.code(), error.what(), error.hint());
  }
  server.queue.add(&portion);
  has_work_ = true;
  if (counters_.trace != nullptr) trace_queued(portion, server);
}

void WorkerLoop::trace_queued(const Transfer& transfer, const ServerConnection& server) {
  if (!counters_.trace->wants(transfer.header->round)) return;
  const std::uint64_t now = counters_.trace->now();
  for (const Part& part : transfer.parts) {
    counters_.trace->record_at(now, TraceStage::kQueued, trace_key(transfer, part), server.node, 0);
  }
}

// Registers the memory, chooses the route, and makes the buffers that it needs.
void WorkerLoop::prepare(Portion& portion, ServerConnection& server) {
  const transport::Reactor::SetUp set_up(&reactor_);
  RouteFacts facts = facts_of(portion, server);
  if (!facts.is_encoded) facts.is_registered = register_memory(portion, server);
  if (facts.is_registered) facts.reach = reach_of(portion, server);
  const Chosen chosen = choose_route(facts);
  portion.route = chosen.route;
  portion.finality = chosen.finality;
  if (portion.route == Route::kInPlace) return;
  if (portion.route == Route::kStagedIfCheap) {
    return server.memory.reserve(std::min(server.memory.in_use() + portion.parts.size(), kMostStagedIfCheap));
  }
  server.memory.reserve(portion.parts.size());
  if (!facts.is_encoded && !facts.is_registered) count_unwatched(portion);
}

RouteFacts WorkerLoop::facts_of(const Portion& portion, const ServerConnection& server) {
  const Operation& operation = *portion.operation;
  const bool is_on_one_host = operation.tensor->is_on_one_host;
  const transport::DirectAccess* direct = server.direct();
  const bool can_fence = direct != nullptr && direct->can_fence();
  RouteFacts facts;
  facts.is_encoded = operation.may_compress() && compresses_to(server, *operation.tensor);
  facts.is_small = operation.bytes() <= kLargestStagedIfCheap;
  facts.is_push_pull = portion.header->kind == tensor::OperationKind::kPushPull;
  facts.is_two_phase = operation.request.two_phase;
  facts.is_continuation = operation.continuation != nullptr;
  facts.lands_in_order = server.memory.transport().lands_in_order();
  // A relay is a rank, whose loss is not outlived: its answers wait until all have theirs. A round of a group on
  // several hosts ends for those who read the log when the others have their answers, and no other round is summed
  // meanwhile: there two phases cost less.
  facts.is_logged = server.log.is_held() && is_on_one_host && !portion.parts.front().for_host();
  facts.others_log = is_on_one_host && server.log.others_may_read;
  facts.reach = direct == nullptr ? Reach::kNetwork : can_fence ? Reach::kUnreadable : Reach::kUnfenced;
  return facts;
}

// Whether the transport may use all of it directly. Whether this rank contributes and wants bytes can differ from
// partition to partition; a block that no partition uses has no bytes.
bool WorkerLoop::register_memory(Portion& portion, ServerConnection& server) {
  const Request& request = portion.operation->request;
  transport::RegionCache& regions = server.memory.regions;
  if (regions.watches()) counters_.given_back.add(regions.drop_changed());
  const bool sends = !request.input_allocation.bytes.empty();
  const bool receives = !request.output_allocation.bytes.empty();
  if (sends) portion.input = regions.find(request.input_allocation);
  if (receives) {
    const bool is_same = portion.input && request.output_allocation.identity == request.input_allocation.identity;
    portion.output = is_same ? portion.input : regions.find(request.output_allocation);
  }
  return (!sends || portion.input != nullptr) && (!receives || portion.output != nullptr);
}

Reach WorkerLoop::reach_of(const Portion& portion, const ServerConnection& server) {
  const transport::DirectAccess* direct = server.direct();
  if (direct == nullptr) return Reach::kNetwork;
  if (!direct->can_fence()) return Reach::kUnfenced;
  const transport::Region* const input = portion.input.get();
  const transport::Region* const output = portion.output == portion.input ? nullptr : portion.output.get();
  const auto maps = [&](const transport::Region* region) { return region == nullptr || direct->peer_maps(*region); };
  if (maps(input) && maps(output)) return Reach::kMapped;
  const auto reaches = [&](const transport::Region* region) {
    return region == nullptr || direct->peer_reaches(*region);
  };
  if (!reaches(input)) return Reach::kUnreadable;
  return reaches(output) ? Reach::kCopies : Reach::kReadable;
}

void WorkerLoop::count_unwatched(const Portion& portion) {
  for (const Part& part : portion.parts) counters_.unwatched_bytes.add(portion.place(part).length);
}

// Within a host compression would cost time and save nothing.
bool WorkerLoop::compresses_to(const ServerConnection& server, const Tensor& tensor) {
  return server.needs_slots() || tensor.compressor->compression().everywhere;
}

// ---- Contributions of this host come in

void WorkerLoop::add_compressed(const std::shared_ptr<const Tensor>& tensor) {
  compressed_[{tensor->group->id, tensor->id}] = tensor;
}

// A connection that can be used, or nullptr.
ServerConnection* WorkerLoop::open_server(std::uint32_t place) {
  if (place >= servers_.size() || !servers_[place] || !servers_[place]->is_open()) return nullptr;
  return servers_[place].get();
}

void WorkerLoop::contribute(std::uint32_t number, const tensor::PushHeader& header, std::int32_t priority,
                            std::uint32_t place) {
  const auto fail = [&](const Error& why) { contributions_.source()->fail(number, why, {}); };
  ServerConnection* server = open_server(place);
  if (server == nullptr) {
    return fail(Error(ErrorCode::kTransport, "this rank does not speak to that server for its host",
                      "install the same bps_rdma version everywhere and use the same settings on all ranks"));
  }
  if (server->loss.is_known()) {
    return fail(loss(server->loss.why()));
  }
  HostContribution& transfer = contributions_.make(number, header, priority, *server);
  if (!compressed_.empty() && Compressor::applies(header.kind, header.op)) {
    const auto found = compressed_.find({header.group, header.tensor});
    if (found != compressed_.end() && compresses_to(*server, *found->second)) transfer.compress(found->second);
  }
  server->queue.add(&transfer);
  has_work_ = true;
  if (counters_.trace != nullptr) trace_queued(transfer, *server);
}

// A server's queue waits for a staging buffer.
void WorkerLoop::add_buffer(ServerConnection& server) {
  const transport::Reactor::SetUp set_up(&reactor_);
  try {
    server.memory.add_buffer();
  } catch (const Error& error) {
    server.queue.needs_buffer = false;
    abort(*server.queue.top(), server, error.code(), error.what(), error.hint());
  }
  has_work_ = true;
}

// ---- Partitions go out

bool WorkerLoop::step() {
  bool found = take_submissions();
  if (receipts_due_) send_receipts();
  if (landed_due_) send_landed();
  if (!has_work_) return found;
  has_work_ = false;
  blocked_ = false;
  for (const auto& server : servers_) {
    if (!server || server->is_closed()) continue;
    if (!server->pushes.repeats.empty()) {
      found |= sender_.repeat(*server);
      if (!server->pushes.repeats.empty()) blocked_ = has_work_ = true;
    }
    if (server->queue.empty()) continue;
    found |= sender_.push(*server);
    if (const auto [broken, why] = sender_.take_broken(); why == Status::kCodec) {
      const Error error = codec_failure();
      abort(*broken, *server, error.code(), error.what(), error.hint());
    } else if (broken != nullptr) {
      // A rank of this host is lost, and its rounds have been told. This one ends when the cause is known.
      server->queue.remove(broken);
    }
    if (server->queue.empty()) continue;
    blocked_ = has_work_ = true;
    if (server->queue.needs_buffer) add_buffer(*server);
  }
  return found;
}

// ---- Answers come back: the bytes are in place already, unless they were staged

InFlight* WorkerLoop::find(std::uint32_t immediate, const ServerConnection& server) {
  InFlight* entry = in_flight_.find(immediate, server);
  if (entry == nullptr) counters_.stale.add();
  return entry;
}

std::size_t WorkerLoop::allows_answer(const ServerConnection& server, std::size_t rail,
                                      const transport::RemoteSpan& where, std::uint32_t immediate) const {
  const InFlight* entry = in_flight_.find(immediate, server);
  if (entry == nullptr || entry->stage != InFlight::Stage::kSent) return 0;
  const tensor::Placement placement = entry->transfer->place(entry->part);
  if (!placement.wants_data()) return 0;
  const transport::RemoteSpan expected = answer_span(*entry, placement, rail);
  if (where.key != expected.key || where.address != expected.address || where.length != expected.length) return 0;
  // Of an element the input is needed again, or all of it has been replaced.
  const bool is_needed = survives_server(entry->transfer->finality) && entry->staged == nullptr;
  return is_needed ? size_of(entry->transfer->header->dtype) : 1;
}

void WorkerLoop::on_cut_off(const ServerConnection& server, std::uint32_t immediate, std::uint64_t bytes) {
  InFlight* entry = in_flight_.find(immediate, server);
  if (entry != nullptr) entry->cut_off = std::max(entry->cut_off, bytes);
}

void WorkerLoop::lose_for_length(ServerConnection& server, std::uint64_t landed, std::uint64_t due) {
  on_lost(server, "it sent an answer of " + std::to_string(landed) + " bytes instead of " + std::to_string(due));
}

void WorkerLoop::on_answer(ServerConnection& server, std::uint32_t immediate, const transport::DataEndpoint* over,
                           std::uint64_t landed) {
  InFlight* entry = find(immediate, server);
  if (entry == nullptr) return;
  if (over != nullptr && !over->is_whole(landed, entry->answer_length)) [[unlikely]]
    return lose_for_length(server, landed, entry->answer_length);
  if (!entry->was_sent()) return counters_.stale.add();  // no server can have answered it
  Transfer& transfer = *entry->transfer;
  if (awaits_commit(transfer.finality)) {
    if (std::exchange(entry->stage, InFlight::Stage::kLanded) == InFlight::Stage::kLanded) return counters_.stale.add();
    server.count_landed(std::exchange(entry->length, 0));
    if (blocked_) has_work_ = true;
    if (transfer.operation != nullptr) return note_landed(*entry, immediate);
    return static_cast<HostContribution&>(transfer).land(immediate, entry->staged->bytes());
  }
  if (entry->staged != nullptr && !take_answer(server, immediate)) return;
  counters_.partitions.add();
  counters_.received_bytes.add(entry->answer_length);
  complete(InFlightTable::index_of(immediate), true);
}

// Out of its buffer. False: it is no result, and the operation or the server ends by that.
bool WorkerLoop::take_answer(ServerConnection& server, std::uint32_t immediate) {
  const InFlight& entry = in_flight_[InFlightTable::index_of(immediate)];
  Transfer& transfer = *entry.transfer;
  switch (transfer.take_answer(entry.part, transfer.place(entry.part), entry.staged->bytes(), counters_)) {
    case Status::kOk: return true;
    case Status::kCodec: fail_answered(immediate, codec_failure()); return false;
    default: on_lost(server, "it sent a result that the tensor's compression cannot have written"); return false;
  }
}

// All members have their answers: those of this rank that are in buffers may go over its inputs.
void WorkerLoop::on_committed(ServerConnection& server, const tensor::Committed& committed) {
  for (const std::uint32_t immediate : committed.immediates) {
    const InFlight* entry = find(immediate, server);
    if (entry == nullptr) continue;
    Transfer& transfer = *entry->transfer;
    const tensor::Placement placement = transfer.place(entry->part);
    if (!awaits_commit(transfer.finality) || (placement.wants_data() && !entry->has_landed())) {
      return on_lost(server, "it committed a round whose result it has not sent");
    }
    const bool has_landed = entry->has_landed() || transfer.operation == nullptr;
    if (has_landed && entry->staged != nullptr && !take_answer(server, immediate)) continue;
    counters_.partitions.add();
    counters_.received_bytes.add(entry->answer_length);
    complete(InFlightTable::index_of(immediate), true);
  }
}

// A push_pull over a network is over when all members have all of it, and until then what has landed takes no slot and
// no credit. So the server is told of several partitions at once. Members that have answers in buffers keep these until
// then, and one that reads a redo log keeps the server from the next sum: hence the limit, and none of this where there
// is a log.
void WorkerLoop::note_landed(const InFlight& entry, std::uint32_t immediate) {
  constexpr std::size_t kMostUntold = 8;
  constexpr std::uint64_t kMostBytes = 4 << 20;
  Transfer& transfer = *entry.transfer;
  const bool is_last = entry.part.partition == transfer.parts.back().partition;
  if (transfer.finality == Finality::kBulkCommit && (is_last || transfer.cancelled)) {
    transfer.finality = Finality::kCommit;  // others may land after it, or it never lands
  }
  const std::size_t untold = entry.server->note_landed(immediate);
  const bool is_enough = untold >= kMostUntold || untold * entry.answer_length >= kMostBytes;
  landed_due_ |= transfer.finality == Finality::kCommit || is_enough;
}

void WorkerLoop::note_landed(std::uint32_t contribution) {
  const HostContribution* landed = contributions_.find(contribution);
  if (landed == nullptr || landed->server->is_closed()) return;
  landed->server->note_landed(landed->immediate());
  landed_due_ = true;
}

void WorkerLoop::send_landed() {
  landed_due_ = false;
  for (const auto& server : servers_) {
    if (server && !server->is_closed()) server->send_landed();
  }
}

// The bytes of a push have left: from here on only the server holds them.
void WorkerLoop::on_written(ServerConnection& server, std::uint32_t immediate) {
  InFlight* entry = in_flight_.find(immediate, server);
  if (entry == nullptr) return;  // its answer was faster
  entry->unsent_bytes = false;
  if (entry->end != InFlight::End::kOpen) end_unanswered(InFlightTable::index_of(immediate));
}

void WorkerLoop::complete(std::uint32_t index, bool answered) {
  const InFlight& entry = in_flight_[index];
  entry.server->count_answered(entry.length);
  Transfer* transfer = entry.transfer;
  if (counters_.trace != nullptr) {
    const bool has_landed = entry.has_landed();
    counters_.trace->record(answered ? TraceStage::kLanded : TraceStage::kAborted, trace_key(*transfer, entry.part),
                            entry.server->node, has_landed ? entry.answer_length : entry.length);
  }
  if (!answered && entry.has_landed()) entry.server->forget_landed(in_flight_.immediate_of(index));
  // What has landed and is perhaps committed elsewhere stays where it is.
  const bool is_kept = !answered && survives_server(transfer->finality) && suspend(index);
  if (entry.staged != nullptr && !is_kept) entry.server->memory.give_back(entry.staged);
  in_flight_.free(index);
  if (blocked_) has_work_ = true;
  transfer->finish(1, answered, counters_);
}

void WorkerLoop::end_unanswered(std::uint32_t index) {
  complete(index, false);
}

void WorkerLoop::end_when_unread(std::uint32_t index, InFlight::End end) {
  InFlight& entry = in_flight_[index];
  if (entry.end == InFlight::End::kOpen) entry.end = end;
  if (!entry.unsent_bytes) end_unanswered(index);
}

}  // namespace bps::worker
