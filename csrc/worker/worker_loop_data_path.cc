// The hot part of a worker_loop: partitions out, answers in.
#include <cstring>
#include <utility>

#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

// With work to do, credits spent and nothing coming back from a server for this long, ranks may be waiting for each
// other in a circle; the limits of this side (scheduling credit, staging) then yield by one partition.
constexpr auto kStuck = std::chrono::milliseconds(2);

std::uint8_t flags_of(const Request& request, std::uint16_t member, std::uint32_t shard) {
  const std::uint8_t both = tensor::kIsPush | tensor::kIsPull;
  switch (request.kind) {
    case Kind::kPushPull: return both | tensor::kHasPayload | tensor::kWantsData;
    case Kind::kReduceScatter: return both | tensor::kHasPayload | (shard == member ? tensor::kWantsData : 0);
    case Kind::kAllGather: return both | (shard == member ? tensor::kHasPayload : tensor::kWantsData);
    case Kind::kBroadcast: return both | (request.root == member ? tensor::kHasPayload : tensor::kWantsData);
    case Kind::kSplit:
      return request.pushes ? tensor::kIsPush | tensor::kHasPayload : tensor::kIsPull | tensor::kWantsData;
  }
  return 0;
}

}  // namespace

bool WorkerLoop::step() {
  bool found = take_submissions();
  if (!has_work_) return found;
  has_work_ = false;
  blocked_ = false;
  for (const auto& server : servers_) {
    if (server && !server->lost && !server->queue.empty()) found |= push(*server);
  }
  return found;
}

// [4] Sends what there is room for.
bool WorkerLoop::push(ServerConnection& server) {
  bool sent = false;
  Batch& batch = batch_;
  for (;;) {
    batch.size = 0;
    bool room = true;
    while (batch.size < Batch::kMost && !server.queue.empty() && room) {
      Operation::Cursor& cursor = *server.queue.top();
      if (cursor.operation->done()) {  // failed: what was not sent is over
        server.queue.pop();
        finish(*cursor.operation, cursor.partitions->size() - cursor.next);
        continue;
      }
      room = prepare(server, cursor, batch);
      if (room && cursor.next == cursor.partitions->size()) server.queue.pop();
    }
    if (batch.size == 0) break;
    const std::size_t accepted = post(server, batch);
    if (accepted > 0) sent = true;
    if (accepted < batch.size) {
      undo(server, batch, accepted);
      break;
    }
    if (!room) break;
  }
  if (!server.queue.empty()) {
    counters_.credit_stalls.add();
    blocked_ = true;
    has_work_ = true;
  }
  return sent;
}

// Whether nothing has landed for a while. Only who is held up asks, and only then is the clock looked at.
bool ServerConnection::is_stuck() {
  const auto now = Clock::now();
  if (std::exchange(landed, false)) last_landing = now;
  return now - last_landing > kStuck;
}

// Makes the next partition of `cursor` ready in the batch; false when a limit says not now.
bool WorkerLoop::prepare(ServerConnection& server, Operation::Cursor& cursor, Batch& batch) {
  Operation& operation = *cursor.operation;
  const Request& request = operation.request;
  const Tensor& tensor = *operation.tensor;
  const bool sharded = request.kind == Kind::kReduceScatter || request.kind == Kind::kAllGather;
  const std::uint32_t partition = (*cursor.partitions)[cursor.next];
  const tensor::Partitioning::Piece piece = (sharded ? tensor.sharded : tensor.whole).piece(partition);
  const std::uint8_t flags = flags_of(request, tensor.member, piece.shard);
  const bool carries = (flags & tensor::kHasPayload) != 0;
  const bool wants = (flags & tensor::kWantsData) != 0;

  bool yields = false;  // both limits at once, or each would wait for the other to do so
  if (credit_ > 0 && server.bytes_in_flight > 0 && server.bytes_in_flight + piece.length > credit_) {
    if (!server.is_stuck()) return false;
    yields = true;
  }
  const std::size_t n = batch.size;
  transport::DataEndpoint& endpoint = *server.data[server.next_data];
  transport::DirectAccess* direct = endpoint.direct();
  if (direct == nullptr) {
    const bool small =
        tensor::is_small_slot(transport::kMaxHeader + (carries ? piece.length : 0)) && !server.small_slots.empty();
    auto& slots = small ? server.small_slots : server.large_slots;
    if (slots.empty()) return false;
    batch.slots[n] = slots.back();
    slots.pop_back();
  }

  const std::uint32_t index = allocate();
  InFlight& entry = in_flight_[index];
  const std::uint64_t shard_start = sharded ? tensor.sharded.shard_offset(tensor.member) : 0;
  const std::uint64_t in_at = piece.offset - (request.kind == Kind::kAllGather ? shard_start : 0);
  const std::uint64_t out_at = piece.offset - (request.kind == Kind::kReduceScatter ? shard_start : 0);
  try {
    if (carries) entry.input = server.regions->find(request.input_allocation);
    if (wants) entry.output = server.regions->find(request.output_allocation);
    if (direct != nullptr &&
        ((carries && !direct->peer_reaches(*entry.input)) || (wants && !direct->peer_reaches(*entry.output)))) {
      if (!staging_) staging_ = std::make_unique<Staging>(options_.largest_partition, options_.staging_bytes);
      entry.stage = staging_->take();
      if (entry.stage == nullptr && (yields || server.is_stuck())) {
        staging_->grow();
        entry.stage = staging_->take();
        yields = true;
      }
      if (entry.stage == nullptr) {
        entry.input.reset();
        entry.output.reset();
        free_entries_.push_back(index);
        return false;
      }
      entry.input = entry.output = server.regions->find(staging_->block_of(entry.stage));
      if (carries) {
        std::memcpy(entry.stage, request.input + in_at, piece.length);
        counters_.copies.add();
        counters_.copied_bytes.add(piece.length);
      }
    }
  } catch (const Error& error) {  // registering memory is set-up: it can fail, and then this operation has
    operation.fail(error.code(), error.what(), error.hint());
    entry.input.reset();
    entry.output.reset();
    free_entries_.push_back(index);
    if (direct == nullptr) server.take(batch.slots[n]);
    return true;  // the next look at the queue sees that it is over
  }
  entry.operation = &operation;
  entry.server = &server;
  entry.partition = partition;
  entry.length = piece.length;
  server.bytes_in_flight += piece.length;

  tensor::PushHeader& header = batch.headers[n];
  header = tensor::PushHeader{};
  header.version = transport::kProtocolVersion;
  header.dtype = tensor.dtype;
  header.op = request.op;
  header.flags = flags;
  header.kind = static_cast<std::uint8_t>(request.kind);
  header.member = tensor.member;
  header.group = tensor.group->id;
  header.tensor = tensor.id;
  header.partition = partition;
  header.round = operation.round;
  header.immediate = index | std::uint32_t{entry.generation} << 24;
  header.length = piece.length;
  const auto offset_in = [&](const transport::Region& region, const std::byte* at) {
    return static_cast<std::uint64_t>((entry.stage != nullptr ? entry.stage : at) - region.bytes().data());
  };
  if (wants) {
    const transport::RemoteSpan answer =
        entry.output->remote(offset_in(*entry.output, request.output + out_at), piece.length);
    header.answer_key = answer.key;
    header.answer_address = answer.address;
  }
  const std::uint64_t source_offset = carries ? offset_in(*entry.input, request.input + in_at) : 0;
  const std::uint64_t length = carries ? piece.length : 0;
  if (direct != nullptr) {
    batch.descriptors[n] = {tensor::bytes_of(header), entry.input.get(), source_offset, length, entry.output.get()};
  } else {
    const tensor::SlotCredit& slot = batch.slots[n];
    batch.writes[n] = {.header = tensor::bytes_of(header),
                       .source = entry.input.get(),
                       .source_offset = source_offset,
                       .length = length,
                       .target = {slot.key, slot.address, slot.capacity},
                       .immediate = slot.slot};
  }
  if (yields) server.landed = true;
  batch.entries[n] = index;
  batch.cursors[n] = &cursor;
  ++batch.size;
  ++cursor.next;
  return true;
}

std::size_t WorkerLoop::post(ServerConnection& server, Batch& batch) {
  transport::DataEndpoint& endpoint = *server.data[server.next_data];
  server.next_data = (server.next_data + 1) % server.data.size();
  if (transport::DirectAccess* direct = endpoint.direct()) return direct->post({batch.descriptors.data(), batch.size});
  return endpoint.write({batch.writes.data(), batch.size});
}

// The window took only the first `from`: the rest goes back to where it came from.
void WorkerLoop::undo(ServerConnection& server, Batch& batch, std::size_t from) {
  for (std::size_t i = batch.size; i-- > from;) {
    InFlight& entry = in_flight_[batch.entries[i]];
    Operation::Cursor* cursor = batch.cursors[i];
    if (cursor->next == cursor->partitions->size()) server.queue.add(cursor);
    --cursor->next;
    if (server.data.front()->direct() == nullptr) server.take(batch.slots[i]);
    server.bytes_in_flight -= entry.length;
    if (entry.stage != nullptr) staging_->give_back(entry.stage);
    entry = InFlight{.generation = entry.generation};
    free_entries_.push_back(batch.entries[i]);
  }
}

std::uint32_t WorkerLoop::allocate() {
  if (free_entries_.empty()) {
    in_flight_.emplace_back();
    return static_cast<std::uint32_t>(in_flight_.size() - 1);
  }
  const std::uint32_t index = free_entries_.back();
  free_entries_.pop_back();
  return index;
}

WorkerLoop::InFlight* WorkerLoop::find(std::uint32_t immediate, const ServerConnection* server) {
  const std::uint32_t index = immediate & 0xffffff;
  if (index < in_flight_.size()) {
    InFlight& entry = in_flight_[index];
    if (entry.operation != nullptr && entry.server == server && entry.generation == immediate >> 24) return &entry;
  }
  counters_.stale.add();
  return nullptr;
}

// [6] An answer: the bytes are in place already.
void ServerConnection::on_write(transport::DataEndpoint&, std::uint32_t immediate) {
  loop.on_write(*this, immediate);
}

void WorkerLoop::on_write(ServerConnection& server, std::uint32_t immediate) {
  InFlight* entry = find(immediate, &server);
  if (entry == nullptr) return;
  if (entry->stage != nullptr) {
    const Operation& operation = *entry->operation;
    const Request& request = operation.request;
    const bool sharded = request.kind == Kind::kReduceScatter || request.kind == Kind::kAllGather;
    const tensor::Partitioning& cut = sharded ? operation.tensor->sharded : operation.tensor->whole;
    const tensor::Partitioning::Piece piece = cut.piece(entry->partition);
    if ((flags_of(request, operation.tensor->member, piece.shard) & tensor::kWantsData) != 0 && !operation.done()) {
      const std::uint64_t start = request.kind == Kind::kReduceScatter ? cut.shard_offset(operation.tensor->member) : 0;
      std::memcpy(request.output + piece.offset - start, entry->stage, piece.length);
      counters_.copies.add();
      counters_.copied_bytes.add(piece.length);
    }
  }
  counters_.partitions.add();
  complete(immediate & 0xffffff);
}

void WorkerLoop::complete(std::uint32_t index) {
  InFlight& entry = in_flight_[index];
  Operation* operation = entry.operation;
  entry.server->bytes_in_flight -= entry.length;
  entry.server->landed = true;
  if (entry.stage != nullptr) staging_->give_back(entry.stage);
  entry = InFlight{.generation = static_cast<std::uint8_t>(entry.generation + 1)};
  free_entries_.push_back(index);
  if (blocked_) has_work_ = true;
  finish(*operation, 1);
}

void ServerConnection::on_descriptor(transport::DataEndpoint&, std::span<const std::byte>,
                                     const transport::RemoteSpan&) {
  loop.on_descriptor();
}

void WorkerLoop::on_descriptor() {
  counters_.stale.add();  // only workers post descriptors
}

}  // namespace bps::worker
