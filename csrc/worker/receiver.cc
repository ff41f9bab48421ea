// SPDX-License-Identifier: Apache-2.0
#include "worker/receiver.h"

#include "compress/codec_call.h"

namespace bps::worker {

void Receiver::lose_for_length(ServerConnection& server, std::uint64_t landed, std::uint64_t due) {
  on_lost(server, "it sent an answer of " + std::to_string(landed) + " bytes instead of " + std::to_string(due));
}

void Receiver::on_answer(ServerConnection& server, std::uint32_t immediate, const transport::DataEndpoint* over,
                         std::uint64_t landed) {
  InFlight* entry = rooms_.partitions.find(immediate, server);
  if (entry == nullptr) return;
  if (over != nullptr && !over->is_whole(landed, entry->answer_length)) [[unlikely]]
    return lose_for_length(server, landed, entry->answer_length);
  if (!entry->was_sent()) return counters_.stale.add();  // no server can have answered it
  if (awaits_commit(entry->transfer->finality)) return on_landed(server, *entry, immediate);
  if (entry->staged != nullptr && !take_answer(server, immediate)) return;
  rooms_.partitions.complete(InFlightTable::index_of(immediate));
}

// Takes the answer of an operation in two phases, which counts when the server commits it.
void Receiver::on_landed(ServerConnection& server, InFlight& entry, std::uint32_t immediate) {
  if (entry.has_landed()) return counters_.stale.add();
  entry.stage = InFlight::Stage::kLanded;
  server.count_landed(std::exchange(entry.length, 0));
  if (entry.transfer->operation == nullptr) {
    return static_cast<HostContribution*>(entry.transfer)->land(immediate, entry.staged->bytes());
  }
  server.untold.push_back(immediate);
  rooms_.connections.note_landed();
}

// Takes an answer out of its buffer. Returns false when it is no result, which ends the operation or the server.
bool Receiver::take_answer(ServerConnection& server, std::uint32_t immediate) {
  const std::uint32_t index = InFlightTable::index_of(immediate);
  InFlight& entry = rooms_.partitions.table[index];
  const bool is_copied = is_copied_by_device(entry.transfer->route);
  switch (is_copied ? rooms_.copies.decode(entry) : rooms_.partitions.take_answer(entry)) {
    case Status::kOk: return !is_copied || !rooms_.copies.take_answer(index);  // the end of the copy completes it
    case Status::kCodec: rooms_.cancellation.fail(index, codec_failure()); return false;
    default: on_lost(server, "it sent a result that the tensor's compression cannot have written"); return false;
  }
}

Error Receiver::codec_failure() const {
  return {ErrorCode::kInvalidArgument, compress::CodecCall::take_failure() + " on " + name_, compress::kMendCodec};
}

// ---- What servers say

void Receiver::on_message(ServerConnection& server, std::span<const std::byte> message) {
  const auto decoded = tensor::decode(message, epoch_);
  if (!decoded) {
    counters_.stale.add();
  } else if (const auto* credits = std::get_if<tensor::Credits>(&*decoded)) {
    server.add_slots(*credits);
    rooms_.connections.note_work();
  } else if (const auto* path = std::get_if<tensor::PathLost>(&*decoded)) {
    rooms_.losses.settle(server, *path);
  } else if (const auto* broken = std::get_if<tensor::PathBroken>(&*decoded)) {
    server.on_path_broken(broken->path);
  } else if (const auto* failed = std::get_if<tensor::PushFailed>(&*decoded)) {
    on_push_failed(server, *failed);
  } else if (const auto* cancelled = std::get_if<tensor::Cancelled>(&*decoded)) {
    on_cancelled(server, *cancelled);
  } else if (const auto* committed = std::get_if<tensor::Committed>(&*decoded)) {
    on_committed(server, *committed);
  } else if (const auto* log = std::get_if<tensor::RedoLogAt>(&*decoded)) {
    server.keep_log(*log);
  } else if (const auto* round = std::get_if<tensor::RoundFailed>(&*decoded)) {
    if (rooms_.contributions.source() == nullptr) return;
    rooms_.contributions.source()->fail_round(round->group, round->tensor, round->partition, round->round,
                                              Error(round->code, round->what, round->hint));
  } else if (const auto* left = std::get_if<tensor::HostHasLeft>(&*decoded)) {
    if (rooms_.contributions.source() == nullptr) return;
    const auto place = static_cast<std::uint32_t>(rooms_.connections.place_of(server));
    rooms_.contributions.source()->end_round(left->group, left->tensor, left->partition, left->round, place,
                                             Error(left->code, left->what, left->hint));
  }
}

// Ends rounds for which all members have their answers. Those of this rank in buffers may now go over its inputs.
void Receiver::on_committed(ServerConnection& server, const tensor::Committed& committed) {
  for (const std::uint32_t immediate : committed.immediates) {
    const InFlight* entry = rooms_.partitions.find(immediate, server);
    if (entry == nullptr) continue;
    const Transfer& transfer = *entry->transfer;
    const tensor::Extent extent = transfer.extent_of(entry->part);
    if (!awaits_commit(transfer.finality) || (extent.wants_data() && !entry->has_landed())) {
      return on_lost(server, "it committed a round whose result it has not sent");
    }
    // A device may have to copy the own part of an all_gather, too.
    const bool is_taken = entry->has_landed() || transfer.operation == nullptr || is_copied_by_device(transfer.route);
    if (is_taken && entry->staged != nullptr && !take_answer(server, immediate)) continue;
    rooms_.partitions.complete(InFlightTable::index_of(immediate));
  }
}

void Receiver::on_push_failed(ServerConnection& server, const tensor::PushFailed& failed) {
  if (failed.immediate == tensor::kWholeSession) return on_lost(server, failed.what + " (" + failed.hint + ")");
  const InFlight* entry = rooms_.partitions.find(failed.immediate, server);
  if (entry == nullptr) return;
  // A relay does not know either what becomes of its host's contribution when the view ends.
  const bool is_undecided = entry->part.for_host() && failed.code == ErrorCode::kRoundAborted;
  rooms_.cancellation.fail(InFlightTable::index_of(failed.immediate), Error(failed.code, failed.what, failed.hint),
                           is_undecided ? InFlight::End::kUndecided : InFlight::End::kAborted);
}

// Ends what was aborted, and waits for answers on their way. The server calls every round answered that is over, even
// one to which this worker has sent nothing. Others decide what is pending.
void Receiver::on_cancelled(ServerConnection& server, const tensor::Cancelled& cancelled) {
  PartitionsInFlight& partitions = rooms_.partitions;
  for (const std::uint32_t immediate : cancelled.aborted) {
    const InFlight* entry = partitions.table.find(immediate, server);
    if (entry == nullptr) continue;  // an error that was sent before has ended it
    if (!cancelled.missing.empty()) entry->transfer->note_missing(server.name, cancelled.missing);
    partitions.end_when_unread(InFlightTable::index_of(immediate));
  }
  for (const std::uint32_t immediate : cancelled.answered) {
    InFlight* entry = partitions.table.find(immediate, server);
    if (entry == nullptr) continue;  // the answer has arrived
    if (entry->was_sent()) {
      rooms_.watch.owe(*entry, InFlight::Owed::kAnswer);
    } else {
      partitions.end_when_unread(InFlightTable::index_of(immediate));
    }
  }
  for (const std::uint32_t immediate : cancelled.pending) {
    InFlight* entry = partitions.table.find(immediate, server);
    if (entry != nullptr) rooms_.watch.owe(*entry, InFlight::Owed::kOutcome);
  }
}

}  // namespace bps::worker
