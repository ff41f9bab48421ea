// SPDX-License-Identifier: Apache-2.0
#include "worker/partitions_in_flight.h"

#include <algorithm>

#include "worker/redo.h"

namespace bps::worker {

InFlight* PartitionsInFlight::find(std::uint32_t immediate, const ServerConnection& server) {
  InFlight* entry = table.find(immediate, server);
  if (entry == nullptr) counters_.stale.add();
  return entry;
}

std::size_t PartitionsInFlight::allows_answer(const ServerConnection& server, std::size_t rail,
                                              const transport::RemoteSpan& where, std::uint32_t immediate) const {
  const InFlight* entry = table.find(immediate, server);
  if (entry == nullptr || entry->stage != InFlight::Stage::kSent) return 0;
  const tensor::Extent extent = entry->transfer->extent_of(entry->part);
  if (!extent.wants_data()) return 0;
  const transport::RemoteSpan expected = answer_span(*entry, extent, rail);
  if (where.key != expected.key || where.address != expected.address || where.length != expected.length) return 0;
  // An answer over an input that is still needed lands in whole elements, so that each is either input or result.
  const bool is_needed = entry->transfer->finality != Finality::kAnswer && entry->staged == nullptr;
  return is_needed ? size_of(entry->transfer->header->dtype) : 1;
}

void PartitionsInFlight::note_cut_off(const ServerConnection& server, std::uint32_t immediate, std::uint64_t bytes) {
  InFlight* entry = table.find(immediate, server);
  if (entry != nullptr) entry->cut_off = std::max(entry->cut_off, bytes);
}

void PartitionsInFlight::note_unread(const ServerConnection& server, std::uint32_t immediate) {
  InFlight* entry = table.find(immediate, server);
  if (entry == nullptr) return;  // the answer was faster
  entry->unsent_bytes = false;
  if (entry->end != InFlight::End::kOpen) end_unanswered(InFlightTable::index_of(immediate));
}

void PartitionsInFlight::note_given_up(const ServerConnection& server, const SentPush& push) {
  const InFlight* entry = table.find(push.immediate, server);
  if (entry != nullptr && entry->slot == push.slot.slot) note_unread(server, push.immediate);
}

std::vector<tensor::AnswerKeys::Key> PartitionsInFlight::answer_keys(const ServerConnection& server, std::size_t rail,
                                                                     std::size_t other) const {
  std::vector<tensor::AnswerKeys::Key> keys;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    const InFlight& entry = table[i];
    if (entry.transfer == nullptr || entry.server != &server || !entry.was_sent()) continue;
    const tensor::Extent extent = entry.transfer->extent_of(entry.part);
    if (!extent.wants_data()) continue;
    keys.push_back({answer_span(entry, extent, rail).key, answer_span(entry, extent, other).key});
  }
  std::ranges::sort(keys);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());  // not by ranges: clang 14 refuses that
  return keys;
}

Status PartitionsInFlight::take_answer(const InFlight& entry) {
  Transfer& transfer = *entry.transfer;
  return transfer.take_answer(entry.part, transfer.extent_of(entry.part), entry.staged->bytes(), counters_);
}

void PartitionsInFlight::complete(std::uint32_t index) {
  counters_.partitions.add();
  counters_.received_bytes.add(table[index].answer_length);
  finish(index, true);
}

void PartitionsInFlight::end_when_unread(std::uint32_t index, InFlight::End end) {
  InFlight& entry = table[index];
  if (entry.is_copying()) return;
  if (entry.end == InFlight::End::kOpen) entry.end = end;
  if (!entry.unsent_bytes) end_unanswered(index);
}

void PartitionsInFlight::finish(std::uint32_t index, bool answered) {
  const InFlight& entry = table[index];
  entry.server->count_answered(entry.length);
  Transfer* transfer = entry.transfer;
  if (counters_.trace != nullptr) {
    const bool has_landed = entry.has_landed();
    counters_.trace->record(answered ? TraceStage::kLanded : TraceStage::kAborted, trace_key(*transfer, entry.part),
                            entry.server->node, has_landed ? entry.answer_length : entry.length);
  }
  if (!answered && entry.has_landed()) std::erase(entry.server->untold, table.immediate_of(index));
  // A result that has landed, and is perhaps committed elsewhere, stays where it is.
  const bool is_kept = !answered && transfer->finality != Finality::kAnswer && suspend(index);
  if (entry.staged != nullptr && !is_kept) entry.server->memory.give_back(entry.staged);
  table.free(index);
  transfer->finish(1, answered, counters_);
}

// ---- What is left of a result whose round has not ended here

// Returns true when the buffer of the partition is needed in the next view.
bool PartitionsInFlight::suspend(std::uint32_t index) {
  const InFlight& entry = table[index];
  const Landed landed = landed_of(index);
  const bool failed = entry.end == InFlight::End::kAborted || !entry.was_sent();
  return entry.transfer->suspend(entry.part.partition, landed, failed) && landed.aside;
}

// Tells what has landed of a partition that ends. After this nothing more of it comes.
Landed PartitionsInFlight::landed_of(std::uint32_t index) {
  InFlight& entry = table[index];
  if (entry.staged != nullptr && entry.has_landed()) return {entry.staged->memory, 0};
  if (entry.transfer->finality == Finality::kLogged) return redo(entry);
  if (entry.staged != nullptr) return {};
  if (entry.has_landed()) return {nullptr, entry.answer_length};
  return {nullptr, std::max(entry.cut_off, entry.server->stop_landing(table.immediate_of(index)))};
}

}  // namespace bps::worker
