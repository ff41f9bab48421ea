// SPDX-License-Identifier: Apache-2.0
// The hot part of the way out: step 4 of the walk (docs/internals.md).
#include "worker/sender.h"

#include <cstring>

namespace bps::worker {

bool Sender::push(ServerConnection& server) {
  bool sent = false;
  for (;;) {
    const bool room = fill(server);
    if (batch_.size == 0) break;
    const std::size_t accepted = post(server);
    if (accepted > 0) sent = true;
    if (accepted < batch_.size) {
      take_back(server, accepted);
      break;
    }
    if (!room) break;
  }
  if (!server.queue.empty()) counters_.credit_stalls.add();
  return sent;
}

// Fills a batch, most urgent partitions first; false when a limit says "not now".
bool Sender::fill(ServerConnection& server) {
  batch_.size = 0;
  while (batch_.size < Batch::kMost && !server.queue.empty()) {
    Operation::Cursor& cursor = *server.queue.top();
    if (cursor.operation->is_failing()) {  // on another loop: this one is about to be told to cancel its part
      server.queue.pop();
      continue;
    }
    if (!add(server, cursor)) return false;
    if (cursor.unsent() == 0) server.queue.pop();
  }
  return true;
}

// Adds the next partition of `cursor` to the batch; false when a limit says "not now".
bool Sender::add(ServerConnection& server, Operation::Cursor& cursor) {
  const Operation& operation = *cursor.operation;
  const std::uint32_t partition = (*cursor.partitions)[cursor.next];
  const tensor::Placement placement = tensor::place(operation.placement, operation.cut(), partition);
  const std::size_t n = batch_.size;

  bool yields = false;  // both limits at once, or each would wait for the other one to yield
  if (!is_within_credit(server, placement.length, yields)) return false;
  if (server.needs_slots() &&
      !server.take_slot(transport::kMaxHeader + (placement.has_payload() ? placement.length : 0), batch_.slots[n])) {
    return false;
  }
  const std::uint32_t index = in_flight_.allocate();
  InFlight& entry = in_flight_[index];
  if (cursor.staged && !stage(server, entry, placement, yields)) {
    in_flight_.free_unsent(index);
    return false;
  }
  entry.cursor = &cursor;
  entry.server = &server;
  entry.partition = partition;
  entry.length = placement.length;
  server.count_sent(placement.length);
  if (yields) server.restart_stuck_timer();

  write_header(n, index, placement);
  const transport::Region* source = nullptr;
  std::uint64_t source_offset = 0;
  if (placement.has_payload()) {
    source = entry.staged != nullptr ? entry.staged->region.get() : cursor.input.get();
    if (entry.staged == nullptr) {
      source_offset =
          static_cast<std::uint64_t>(operation.request.input - source->bytes().data()) + placement.input_offset;
    }
  }
  const std::uint64_t length = placement.has_payload() ? placement.length : 0;
  if (server.needs_slots()) {
    const tensor::SlotCredit& slot = batch_.slots[n];
    batch_.writes[n] = {.header = tensor::bytes_of(batch_.headers[n]),
                        .source = source,
                        .source_offset = source_offset,
                        .length = length,
                        .target = {slot.key, slot.address, slot.capacity},
                        .immediate = slot.slot,
                        .token = batch_.headers[n].immediate};
    entry.unsent_bytes = true;
  } else {
    const transport::Region* answer = entry.staged != nullptr ? entry.staged->region.get() : cursor.output.get();
    batch_.descriptors[n] = {tensor::bytes_of(batch_.headers[n]), source, source_offset, length,
                             placement.wants_data() ? answer : nullptr};
  }
  batch_.entries[n] = index;
  ++batch_.size;
  ++cursor.next;
  return true;
}

bool Sender::is_within_credit(ServerConnection& server, std::uint64_t length, bool& yields) const {
  if (credit_ == 0 || server.bytes_in_flight() == 0 || server.bytes_in_flight() + length <= credit_) return true;
  yields = server.is_stuck();
  return yields;
}

// Copies the partition to where the server reaches it. Without a free buffer it waits for an answer to free one or,
// when that could last for ever, for the loop to add one.
bool Sender::stage(ServerConnection& server, InFlight& entry, const tensor::Placement& placement, bool& yields) {
  entry.staged = server.memory.take();
  if (entry.staged == nullptr) {
    server.needs_buffer = yields || server.is_stuck();
    return false;
  }
  yields |= std::exchange(server.needs_buffer, false);
  if (placement.has_payload()) {
    const Operation& operation = *server.queue.top()->operation;
    std::memcpy(entry.staged->bytes(), operation.request.input + placement.input_offset, placement.length);
    counters_.copies.add();
    counters_.copied_bytes.add(placement.length);
  }
  return true;
}

void Sender::write_header(std::size_t n, std::uint32_t index, const tensor::Placement& placement) {
  const InFlight& entry = in_flight_[index];
  const Operation::Cursor& cursor = *entry.cursor;
  const Operation& operation = *cursor.operation;
  const Tensor& tensor = *operation.tensor;
  tensor::PushHeader& header = batch_.headers[n];
  header = tensor::PushHeader{};
  header.version = transport::kProtocolVersion;
  header.dtype = tensor.dtype;
  header.op = operation.request.op;
  header.flags = placement.flags;
  header.kind = operation.request.kind;
  header.member = tensor.member;
  header.group = tensor.group->id;
  header.tensor = tensor.id;
  header.partition = entry.partition;
  header.round = operation.round;
  header.epoch = epoch_;
  header.immediate = in_flight_.immediate_of(index);
  header.length = placement.length;
  if (!placement.wants_data()) return;
  const transport::RemoteSpan answer = answer_span(entry, placement);
  header.answer_key = answer.key;
  header.answer_address = answer.address;
}

std::size_t Sender::post(ServerConnection& server) {
  transport::DataEndpoint& endpoint = server.next_endpoint();
  if (server.needs_slots()) return endpoint.write({batch_.writes.data(), batch_.size});
  return endpoint.direct()->post({batch_.descriptors.data(), batch_.size});
}

// The window accepted only the first `from` partitions: the others go back to where they came from.
void Sender::take_back(ServerConnection& server, std::size_t from) {
  for (std::size_t i = batch_.size; i-- > from;) {
    const InFlight& entry = in_flight_[batch_.entries[i]];
    Operation::Cursor* cursor = entry.cursor;
    if (cursor->unsent() == 0) server.queue.add(cursor);
    --cursor->next;
    if (server.needs_slots()) server.add_slot(batch_.slots[i]);
    server.count_unsent(entry.length);
    if (entry.staged != nullptr) server.memory.give_back(entry.staged);
    in_flight_.free_unsent(batch_.entries[i]);
  }
}

}  // namespace bps::worker
