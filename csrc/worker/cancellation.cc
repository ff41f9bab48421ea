// SPDX-License-Identifier: Apache-2.0
#include "worker/cancellation.h"

#include <utility>

namespace bps::worker {

void Cancellation::abort(Operation& operation, const Error& why) {
  if (!operation.fail(why.code(), why.what(), why.hint())) return;
  const auto alive = operation.shared_from_this();  // the operation's last partition may end here
  if (events_.when_failing) events_.when_failing(alive);
  cancel(operation);
}

void Cancellation::abort(Transfer& transfer, ServerConnection& server, const Error& why) {
  if (transfer.operation != nullptr) return abort(*transfer.operation, why);
  (void)transfer.fail(why.code(), why.what(), why.hint());
  cancel_transfer(transfer, server);
}

void Cancellation::cancel(Operation& operation) {
  const auto alive = operation.shared_from_this();
  for (std::size_t place = 0; place < connections_.places(); ++place) {
    Portion& part = portion(operation, place);
    if (part.unfinished > 0) cancel_transfer(part, connections_.at(place));
  }
}

void Cancellation::fail(std::uint32_t index, const Error& why, InFlight::End end) {
  Transfer& transfer = *partitions_.table[index].transfer;
  const auto alive = transfer.operation == nullptr ? nullptr : transfer.operation->shared_from_this();
  const bool is_first = transfer.fail(why.code(), why.what(), why.hint());
  partitions_.end_when_unread(index, end);
  if (!is_first || !alive) return;
  if (events_.when_failing) events_.when_failing(alive);
  cancel(*alive);
}

// Cancels a transfer, once. What was never sent to a server that is lost, or is being fenced, is over at once.
void Cancellation::cancel_transfer(Transfer& transfer, ServerConnection& server) {
  if (transfer.cancelled) return;
  transfer.cancelled = true;
  server.queue.remove(&transfer);
  server.fetching.remove(&transfer);
  if (server.queue.needs_buffer == &transfer) server.queue.needs_buffer = nullptr;
  while (StagingBuffer* unsent = transfer.encoded) {
    transfer.encoded = std::exchange(unsent->next, nullptr);
    server.memory.give_back(unsent);
  }
  const bool is_closed = server.is_closed();
  if (is_closed || server.loss.is_known()) {
    const bool is_unsent = transfer.unsent() == transfer.unfinished;
    drop_unsent(transfer);
    if (is_closed || is_unsent) return;
  }
  send_cancel(transfer, server);
}

// Tells the server for which partitions nobody waits any more. It tells those that were never sent, too: other ranks
// may wait for them there.
void Cancellation::send_cancel(Transfer& transfer, ServerConnection& server) {
  server.send_landed();  // what other members wait for may be complete
  InFlightTable& table = partitions_.table;
  tensor::Cancel message = transfer.make_cancel();
  message.for_host = transfer.parts.front().for_host();
  const auto send = [&] {
    (void)server.send(message);
    message.partitions.clear();
  };
  const auto add = [&](std::uint32_t index) {
    watch_.owe(table[index], InFlight::Owed::kReply);
    const Part& part = table[index].part;
    if (part.for_host() != message.for_host && !message.partitions.empty()) send();
    message.for_host = part.for_host();
    message.partitions.push_back({table.immediate_of(index), part.partition, part.for_host() ? part.place : 0});
    if (message.partitions.size() == tensor::kMostCancelled) send();
  };
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].transfer == &transfer && !table[i].is_copying()) add(i);
  }
  for (; transfer.unsent() > 0; ++transfer.next) {
    const std::uint32_t index = table.allocate();
    InFlight& entry = table[index];
    entry.transfer = &transfer;
    entry.server = &server;
    entry.part = transfer.parts[transfer.next];
    entry.stage = InFlight::Stage::kNeverSent;
    server.outstanding.note_sent(0);
    add(index);
  }
  if (!message.partitions.empty()) send();
}

void Cancellation::drop_unsent(Transfer& transfer) {
  const std::uint32_t unsent = transfer.unsent();
  if (unsent == 0) return;
  if (transfer.finality != Finality::kAnswer) {
    for (const Part& part : transfer.parts.subspan(transfer.next)) (void)transfer.suspend(part.partition, {}, true);
  }
  transfer.next += unsent;
  transfer.finish(unsent, false, counters_);
}

}  // namespace bps::worker
