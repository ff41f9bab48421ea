// SPDX-License-Identifier: Apache-2.0
#include "worker/admission.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace bps::worker {
namespace {

constexpr std::size_t kSubmissions = 1 << 14;  // operations on their way into a loop; callers wait beyond
// A server reads and writes memory that it cannot map by two system calls for each partition, by which the kernel
// copies half as fast as a process does in its caches. For small tensors two copies by the worker take less time. This
// was measured with a server of its own: without the copies, operations of 64 to 256 KiB take 1.25 to 1.35 times as
// long; with them, those of 512 KiB take 1.3 times as long, as the server waits for them. With servers in the workers,
// 512 KiB and 1 MiB take 1.3 to 1.4 times as long without. Copies of 4 MiB fill the cache.
constexpr std::uint64_t kLargestStagedIfCheap = 256 << 10;
constexpr std::uint64_t kLargestStagedBesideOwnServer = 1 << 20;
constexpr std::size_t kMostStagedIfCheap = 16;  // buffers; without a free one partitions do not wait, and go in place

RouteFacts facts_of(const Portion& portion, const ServerConnection& server, std::uint64_t largest_staged) {
  const Operation& operation = *portion.operation;
  const transport::DirectAccess* direct = server.direct();
  const bool can_fence = direct != nullptr && direct->can_fence();
  RouteFacts facts;
  facts.is_encoded = operation.may_compress() && compresses_to(server, *operation.tensor);
  facts.is_on_device = operation.on_device != nullptr;
  facts.is_small = operation.bytes() <= largest_staged;
  facts.survives_servers = operation.request.survives_servers;
  facts.is_continuation = operation.continuation != nullptr;
  facts.lands_in_order = server.memory.transport().lands_in_order();
  // A job does not outlive the loss of a relay, which is a rank, so its answers wait until all have theirs. A round of
  // a group on several hosts ends for those who read the log when the others have their answers. No other round is
  // summed meanwhile, so two phases cost less there.
  facts.is_logged = server.log.is_held() && operation.tensor->is_on_one_host && !portion.parts.front().for_host();
  facts.reach = direct == nullptr ? Reach::kNetwork : can_fence ? Reach::kUnreadable : Reach::kUnfenced;
  return facts;
}

// Tells what the server can do with memory that is registered.
Reach reach_of(const Portion& portion, const ServerConnection& server) {
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

}  // namespace

bool compresses_to(const ServerConnection& server, const Tensor& tensor) {
  return server.needs_slots() || tensor.compressor->compression().everywhere;
}

void enqueue(Transfer& transfer, ServerConnection& server, Connections& connections, Counters& counters) {
  (is_copied_by_device(transfer.route) ? server.fetching : server.queue).add(&transfer);
  connections.note_work();
  if (counters.trace == nullptr || !counters.trace->wants(transfer.header->round)) return;
  const std::uint64_t now = counters.trace->now();
  for (const Part& part : transfer.parts) {
    counters.trace->record_at(now, TraceStage::kQueued, trace_key(transfer, part), server.node, 0);
  }
}

Admission::Admission(transport::Reactor& reactor, Connections& connections, Cancellation& cancellation,
                     DeviceCopies& copies, bool gpudirect)
    : reactor_(reactor),
      counters_(reactor.counters()),
      connections_(connections),
      cancellation_(cancellation),
      copies_(copies),
      gpudirect_(gpudirect),
      submissions_(kSubmissions) {}

void Admission::submit(const std::shared_ptr<Operation>& operation, bool watches_deadline) {
  Submission submission{operation, watches_deadline};
  while (!submissions_.push(std::move(submission))) {  // NOLINT(bugprone-use-after-move): a full ring leaves it alone
    if (operation->deadline.passed()) {
      throw Error(ErrorCode::kTimeout, operation->describe() + ": too many operations are waiting to start",
                  "wait for earlier operations before starting more");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // 16,384 operations ahead of us: not the data path
  }
}

void Admission::admit(Operation& operation) {
  if (ended_) cancellation_.abort(operation, *ended_);
  for (std::size_t place = 0; place < connections_.places(); ++place) {
    Portion& portion = cancellation_.portion(operation, place);
    if (!portion.parts.empty()) admit(portion, connections_.at(place));
  }
  set_pace(operation);
}

// No pace is set in two phases, where an answer is not the end of a partition and servers take turns. A relay's answer
// is that of the server to which the host's contribution goes on.
void Admission::set_pace(Operation& operation) {
  if (!operation.paces || operation.request.survives_servers) return;
  const std::uint8_t number = cancellation_.loop();
  std::size_t servers = 0, over_network = 0;
  meets_.assign(connections_.places(), false);
  const auto meet = [&](std::size_t place, bool by_network) {
    if (meets_[place]) return;
    meets_[place] = true;
    ++servers;
    over_network += by_network;
  };
  for (std::size_t place = 0; place < connections_.places(); ++place) {
    Portion& portion = cancellation_.portion(operation, place);
    if (portion.parts.empty()) continue;
    portion.pace = number;
    const bool needs_slots = connections_.at(place).needs_slots();
    for (const Part& part : portion.parts) {  // a place may be a server and a relay
      part.for_host() ? meet(part.place, !operation.tensor->is_on_one_host) : meet(place, needs_slots);
    }
  }
  operation.paces[number].begin(over_network > 1 ? servers * operation.tensor->ahead : Pace::kNone);
}

void Admission::admit(Portion& portion, ServerConnection& server) {
  Operation& operation = *portion.operation;
  if (server.loss.is_known()) cancellation_.abort(operation, connections_.failure_of(server));
  if (operation.is_failing()) return;
  try {
    prepare(portion, server);
  } catch (const Error& error) {
    return cancellation_.abort(operation, error);
  }
  if (portion.route == Route::kDeviceDirect) return copies_.gate.hold(portion, server);
  enqueue(portion, server, connections_, counters_);
}

void Admission::prepare(Portion& portion, ServerConnection& server) {
  const transport::Reactor::SetUp set_up(&reactor_);
  const bool sums_itself = connections_.have_own_server();
  RouteFacts facts = facts_of(portion, server, sums_itself ? kLargestStagedBesideOwnServer : kLargestStagedIfCheap);
  if (!facts.is_encoded) {
    facts.is_registered = facts.is_on_device ? register_on_device(portion, server) : register_memory(portion, server);
  }
  if (facts.is_registered) facts.reach = reach_of(portion, server);
  const Chosen chosen = choose_route(facts);
  portion.route = chosen.route;
  portion.finality = chosen.finality;
  if (portion.route == Route::kInPlace) return;
  if (portion.route == Route::kDeviceDirect) return copies_.gate.prepare(portion.operation->on_device->device);
  if (portion.route == Route::kStagedIfCheap) {
    return server.memory.reserve(std::min(server.memory.in_use() + portion.parts.size(), kMostStagedIfCheap));
  }
  server.memory.reserve(portion.parts.size());
  if (facts.is_on_device) return copies_.prepare(portion, server);
  if (facts.is_encoded || facts.is_registered) return;
  for (const Part& part : portion.parts) counters_.unwatched_bytes.add(portion.extent_of(part).length);
}

// Returns true when the transport may use all of the memory directly. Whether this rank contributes and wants bytes can
// differ from partition to partition. A block that no partition uses has no bytes.
bool Admission::register_memory(Portion& portion, ServerConnection& server) {
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

// Returns true when RDMA devices may use all of the memory directly. The own part of an all_gather that lies apart from
// its result has to be copied there, which the route for copies does.
bool Admission::register_on_device(Portion& portion, ServerConnection& server) const {
  const Request& request = portion.operation->request;
  if (!gpudirect_ || request.survives_servers) return false;
  if (!server.needs_slots() || !server.memory.transport().takes_foreign()) return false;
  const auto lies_apart = [&](const Part& part) { return is_own_part_beside(request, portion.extent_of(part)); };
  if (request.kind == tensor::OperationKind::kAllGather && std::ranges::any_of(portion.parts, lies_apart)) return false;
  const device::Device& device = portion.operation->on_device->device;
  const auto find = [&](std::span<std::byte> bytes, transport::RegionPtr& region) {
    if (bytes.empty()) return true;
    region = server.memory.device_regions.find(device, bytes);
    return region != nullptr;
  };
  if (find(request.input_allocation.bytes, portion.input) && find(request.output_allocation.bytes, portion.output)) {
    return portion.input != nullptr || portion.output != nullptr;
  }
  portion.input.reset();
  return false;
}

void Admission::add_buffer(ServerConnection& server) {
  const transport::Reactor::SetUp set_up(&reactor_);
  try {
    server.memory.add_buffer();
  } catch (const Error& error) {
    const Transfer* const asks = std::exchange(server.queue.needs_buffer, nullptr);
    const auto found = std::ranges::find(server.queue.all(), asks);
    if (found != server.queue.all().end()) cancellation_.abort(**found, server, error);
  }
  connections_.note_work();
}

}  // namespace bps::worker
