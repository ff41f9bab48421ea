// SPDX-License-Identifier: Apache-2.0
// Contains the hot part of the way out: step 4 of the walk (docs/internals.md).
#include "worker/sender.h"

#include "worker/operation.h"

namespace bps::worker {

bool Sender::push(ServerConnection& server) {
  bool sent = false;
  std::size_t refused = 0;  // how many connections have no room, one after the other
  std::uint64_t bytes = 0;
  is_paced_ = false;
  for (;;) {
    const bool room = fill(server);
    if (batch_.size == 0) break;
    if (counters_.trace != nullptr) trace_sending(server);
    const std::size_t accepted = post(server);
    if (accepted > 0) sent = true;
    if (accepted < batch_.size) {
      take_back(server, accepted);
      if (++refused == server.paths.streams().size()) break;
      continue;  // another connection may have room
    }
    refused = 0;
    bytes += batch_.bytes;
    if (!room || bytes >= server.queue.most_per_turn) break;
  }
  if (!server.queue.empty()) {
    (is_paced_ ? counters_.pace_stalls : counters_.credit_stalls).add();
    if (counters_.trace != nullptr) trace_stall(server);
  }
  return sent;
}

// Comes before the call that sends, so that no server has a push before that time, by which clocks are compared. A push
// that is taken back is noted again.
void Sender::trace_sending(const ServerConnection& server) {
  TraceRing& ring = *counters_.trace;
  std::uint64_t now = 0;
  for (std::size_t i = 0; i < batch_.size; ++i) {
    const tensor::PushHeader& header = batch_.headers[i];
    if (!ring.wants(header.round)) continue;
    if (now == 0) now = ring.now();
    const bool for_host = (header.flags & tensor::kForHost) != 0;
    ring.record_at(now, TraceStage::kSent, {header.group, header.tensor, header.round, header.partition, for_host},
                   server.node, header.length);
  }
}

// Records each partition once: a loop that is held up looks again and again.
void Sender::trace_stall(ServerConnection& server) {
  const Transfer& transfer = *server.queue.top();
  const TraceKey key = trace_key(transfer, transfer.parts[transfer.next]);
  if (std::exchange(stalled_, key) == key) return;
  counters_.trace->record(TraceStage::kStalled, key, server.node, 0);
}

// Fills a batch, most urgent partitions first. Returns false when a limit says "not now".
bool Sender::fill(ServerConnection& server) {
  batch_.size = 0;
  batch_.bytes = 0;
  batch_.endpoint = server.paths.next();
  while (batch_.size < Batch::kMost && batch_.bytes < server.queue.most_per_turn && !server.queue.empty()) {
    Transfer* transfer = server.queue.top();
    if (transfer->operation != nullptr && transfer->operation->is_failing()) {
      // Another loop has failed it. This loop is about to be told to cancel its part.
      server.queue.pop();
      continue;
    }
    if (is_paced(*transfer) && (transfer = find_past(server)) == nullptr) return false;
    if (!add(server, *transfer)) return false;
    if (transfer->unsent() == 0) server.queue.remove(transfer);
    // A host's contribution has just been summed. The network carries it while the next one is summed.
    if (transfer->operation == nullptr) break;
  }
  return true;
}

// Returns the next transfer that may pass the first one, which the pace holds back. The answers for which that one
// waits may need what this process contributes for its host. Other operations pass, too, because other ranks may not
// have started the first one yet. Over a network they pass only after a while, as they take the link from it.
Transfer* Sender::find_past(const ServerConnection& server) {
  const Transfer& first = *server.queue.top();
  const bool all_pass = !server.needs_slots() || first.operation->paces[first.pace].lets_others_pass();
  return server.queue.find([&](const Transfer& one) {
    if (one.operation == nullptr) return true;
    return all_pass && !one.operation->is_failing() && !is_paced(one);
  });
}

bool Sender::holds_back(const Transfer& transfer) {
  Operation* const operation = transfer.operation;  // null: a host's contribution, which no pace holds back
  if (operation == nullptr || operation->paces[transfer.pace].allows(transfer.parts[transfer.next].turn)) return false;
  is_paced_ = true;
  return true;
}

// Adds the next partition of a transfer to the batch. Returns false when a limit says "not now".
bool Sender::add(ServerConnection& server, Transfer& transfer) {
  const Part part = transfer.parts[transfer.next];
  tensor::Extent extent = transfer.extent_of(part);
  const std::size_t n = batch_.size;

  bool yields = false;  // both limits yield at once, or each would wait for the other one to yield
  const std::uint64_t travels = extent.payload_bytes();
  if (!is_within_budget(server, travels, yields)) return false;
  if (server.needs_slots() &&
      !server.slots.take(transport::kMaxHeader + (extent.has_payload() ? travels : 0), batch_.slots[n])) {
    return false;
  }
  StagingBuffer* staged = nullptr;
  if (!is_in_place(transfer.route)) {
    const std::optional<StagingBuffer*> found = stage(server, transfer, part, extent, yields);
    if (!found) {
      if (server.needs_slots()) (void)server.slots.grant(batch_.slots[n]);
      return false;
    }
    staged = *found;
  }
  const std::uint32_t index = in_flight_.allocate();
  InFlight& entry = in_flight_[index];
  entry.transfer = &transfer;
  entry.server = &server;
  entry.part = part;
  entry.length = extent.payload_bytes();
  entry.answer_length = extent.wants_data() ? extent.answer_bytes() : 0;
  entry.staged = staged;
  server.outstanding.note_sent(entry.length);
  batch_.bytes += entry.length;
  if (yields) server.outstanding.restart_stall();

  describe(server, n, index, extent);
  batch_.entries[n] = index;
  ++batch_.size;
  ++transfer.next;
  return true;
}

// Finds a buffer for the partition of a staged transfer, and puts the payload into it. Returns null if it needs none,
// and nothing when a limit says "not now", or the payload cannot be read.
std::optional<StagingBuffer*> Sender::stage(ServerConnection& server, Transfer& transfer, const Part& part,
                                            tensor::Extent& extent, bool& yields) {
  if (StagingBuffer* const encoded = transfer.encoded; encoded != nullptr) {
    if (const Status status = encode_copied(server, transfer, part, extent); status != Status::kOk) {
      broken_ = {&transfer, status};
      return std::nullopt;
    }
    transfer.encoded = std::exchange(encoded->next, nullptr);
    // If the device has copied no other partition yet, DeviceCopies queues the transfer again when it has.
    const bool is_last = transfer.next + 1 == transfer.parts.size();
    if (is_copied_by_device(transfer.route) && transfer.encoded == nullptr && !is_last) server.queue.remove(&transfer);
    return encoded;
  }
  const bool is_read_in_place = transfer.route == Route::kAnswersAside;
  if (is_read_in_place && !extent.wants_data()) return nullptr;
  if (transfer.route == Route::kStagedIfCheap && !server.memory.has_free()) return nullptr;
  // There are no more buffers than partitions that can be sent.
  StagingBuffer* const buffer = take_buffer(server, transfer, yields);
  if (buffer == nullptr) return std::nullopt;
  if (!extent.has_payload() || is_read_in_place) return buffer;
  const Status filled = transfer.fill(part, extent, buffer->bytes(), counters_);
  if (filled == Status::kOk) return buffer;
  server.memory.give_back(buffer);
  broken_ = {&transfer, filled};
  return std::nullopt;
}

// Encodes the next partition of a transfer, if a device has copied it and it travels compressed. It may have been
// encoded before, and taken back.
Status Sender::encode_copied(ServerConnection& server, Transfer& transfer, const Part& part,
                             const tensor::Extent& extent) {
  StagingBuffer& copied = *transfer.encoded;
  if (transfer.route != Route::kDeviceEncoded || !extent.is_compressed() || copied.is_encoded) return Status::kOk;
  StagingBuffer& spare = server.memory.spare();
  auto& portion = static_cast<Portion&>(transfer);
  const Status status = portion.encode(part, extent, copied.bytes(), spare.bytes(), counters_);
  if (status != Status::kOk) return status;
  copied.swap_bytes(spare);
  copied.is_encoded = true;
  return Status::kOk;
}

// Writes what the transport needs to send entry `index` of the table as number n of the batch.
void Sender::describe(ServerConnection& server, std::size_t n, std::uint32_t index, const tensor::Extent& extent) {
  InFlight& entry = in_flight_[index];
  const Transfer& transfer = *entry.transfer;
  const StagingBuffer* staged = entry.staged;
  const transport::Rails& rails = server.paths.endpoint(batch_.endpoint).rails;
  write_header(n, index, extent, rails.here);
  const transport::Region* source = nullptr;
  std::uint64_t source_offset = 0;
  if (extent.has_payload()) {
    if (staged != nullptr && transfer.route != Route::kAnswersAside) {
      source = staged->region.get();
    } else {
      source = transfer.input.get();
      source_offset = static_cast<std::uint64_t>(transfer.input_bytes - source->bytes().data()) + extent.input_offset;
    }
  }
  const std::uint64_t length = extent.has_payload() ? extent.payload_bytes() : 0;
  if (server.needs_slots()) {
    const tensor::SlotCredit& slot = batch_.slots[n];
    batch_.writes[n] = {.header = tensor::bytes_of(batch_.headers[n]),
                        .source = source,
                        .source_offset = source_offset,
                        .length = length,
                        .target = {server.slots.key(slot, rails.there), slot.address, slot.capacity},
                        .immediate = slot.slot,
                        .token = batch_.headers[n].immediate};
    entry.unsent_bytes = true;
    entry.slot = slot.slot;
  } else {
    const transport::Region* answer = staged != nullptr ? staged->region.get() : transfer.output.get();
    batch_.postings[n] = {tensor::bytes_of(batch_.headers[n]), source, source_offset, length,
                          extent.wants_data() ? answer : nullptr};
  }
}

bool Sender::is_within_budget(ServerConnection& server, std::uint64_t length, bool& yields) const {
  if (budget_ == 0 || server.outstanding.bytes() == 0 || server.outstanding.bytes() + length <= budget_) return true;
  yields = server.outstanding.check_stall();
  return yields;
}

// Returns a buffer that the server reaches. Without a free one the partition waits for the loop to add one. Once the
// budget is used up it waits for an answer to free one, unless that could last for ever.
StagingBuffer* Sender::take_buffer(ServerConnection& server, const Transfer& transfer, bool& yields) {
  StagingBuffer* buffer = server.memory.take();
  if (buffer == nullptr) {
    const bool needs_one = yields || server.memory.may_grow() || server.outstanding.check_stall();
    server.queue.needs_buffer = needs_one ? &transfer : nullptr;
  } else {
    yields |= std::exchange(server.queue.needs_buffer, nullptr) == &transfer;
  }
  return buffer;
}

void Sender::write_header(std::size_t n, std::uint32_t index, const tensor::Extent& extent, std::size_t rail) {
  const InFlight& entry = in_flight_[index];
  tensor::PushHeader& header = batch_.headers[n];
  header = *entry.transfer->header;
  header.flags |= extent.flags;  // adds to those that are the same in all partitions
  header.partition = entry.part.partition;
  header.epoch = epoch_;
  header.immediate = in_flight_.immediate_of(index);
  header.length = static_cast<std::uint32_t>(extent.length);
  if (entry.part.for_host()) {
    header.flags |= tensor::kForHost;
    header.priority = entry.transfer->priority;
    header.place = entry.part.place;
  }
  if (entry.transfer->finality == Finality::kLogged) header.place = tensor::PushHeader::kLogged;
  if (!extent.wants_data()) return;
  const transport::RemoteSpan answer = answer_span(entry, extent, rail);
  header.answer_key = answer.key;
  header.answer_address = answer.address;
}

std::size_t Sender::post(ServerConnection& server) {
  transport::DataEndpoint& endpoint = server.paths.endpoint(batch_.endpoint);
  server.paths.charge(batch_.endpoint, batch_.bytes);
  if (server.needs_slots()) {
    const std::size_t accepted = endpoint.write({batch_.writes.data(), batch_.size});
    if (server.paths.fails_over()) {
      for (std::size_t i = 0; i < accepted; ++i) {
        server.pushes.note(batch_.slots[i], batch_.headers[i].immediate, server.paths.stream(batch_.endpoint));
      }
    }
    return accepted;
  }
  return endpoint.direct()->post({batch_.postings.data(), batch_.size});
}

bool Sender::repeat(ServerConnection& server) {
  bool sent = false;
  std::size_t refused = 0;
  while (!server.pushes.repeats.empty() && refused < server.paths.streams().size()) {
    const SentPush push = server.pushes.repeats.back();
    InFlight* entry = in_flight_.find(push.immediate, server);
    if (entry == nullptr || entry->end != InFlight::End::kOpen || entry->transfer->cancelled) {
      // Nobody waits for it. The server was told when the operation was given up, and has never seen this push.
      if (entry != nullptr) entry->stage = InFlight::Stage::kNeverSent;
      (void)server.slots.grant(push.slot);
      server.pushes.repeats.pop_back();
      continue;
    }
    const tensor::Extent extent = entry->transfer->extent_of(entry->part);
    batch_.endpoint = server.paths.next();
    batch_.slots[0] = push.slot;
    batch_.size = 1;
    batch_.bytes = extent.payload_bytes();
    describe(server, 0, InFlightTable::index_of(push.immediate), extent);
    if (post(server) == 0) {
      entry->unsent_bytes = false;
      ++refused;
      continue;
    }
    counters_.repeated.add();
    refused = 0;
    sent = true;
    server.pushes.repeats.pop_back();
  }
  return sent;
}

// Takes back all but the first `from` partitions, which the window has accepted. They go back to where they came from.
void Sender::take_back(ServerConnection& server, std::size_t from) {
  for (std::size_t i = batch_.size; i-- > from;) {
    const InFlight& entry = in_flight_[batch_.entries[i]];
    Transfer* transfer = entry.transfer;
    const bool is_kept = is_encoded(transfer->route) || is_copied_by_device(transfer->route);
    const bool is_dry = is_copied_by_device(transfer->route) && transfer->encoded == nullptr;
    if (transfer->unsent() == 0 || is_dry) server.queue.add(transfer);
    --transfer->next;
    if (server.needs_slots()) (void)server.slots.grant(batch_.slots[i]);
    server.outstanding.take_back(entry.length);
    if (entry.staged != nullptr && is_kept) {
      entry.staged->next = std::exchange(transfer->encoded, entry.staged);
    } else if (entry.staged != nullptr) {
      server.memory.give_back(entry.staged);
    }
    in_flight_.free_unsent(batch_.entries[i]);
  }
}

}  // namespace bps::worker
