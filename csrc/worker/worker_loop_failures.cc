// SPDX-License-Identifier: Apache-2.0
// What fails on a worker loop, or is given up: deadlines, silent servers, refused pushes, aborts.
#include <algorithm>
#include <cstring>
#include <string>

#include "compress/codec_call.h"
#include "core/log.h"
#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

// What an answer that a server says it has posted may take beyond the time for silence: the slowest link that counts as
// working delivers so many bytes in a second.
constexpr double kSlowestLink = 1e6;

double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string in_words(double seconds) {
  std::string text = std::to_string(seconds);
  return text.substr(0, text.find('.') + 2) + " s";
}

}  // namespace

// ---- Aborts

void WorkerLoop::abort(Operation& operation, ErrorCode code, const std::string& what, const std::string& hint) {
  if (!operation.fail(code, what, hint)) return;
  const auto alive = operation.shared_from_this();  // its last partition may end here
  if (when_failing) when_failing(alive);
  cancel(operation);
}

void WorkerLoop::abort(Transfer& transfer, ServerConnection& server, ErrorCode code, const std::string& what,
                       const std::string& hint) {
  if (transfer.operation != nullptr) return abort(*transfer.operation, code, what, hint);
  (void)transfer.fail(code, what, hint);
  cancel(transfer, server);
}

void WorkerLoop::cancel(Operation& operation) {
  const auto alive = operation.shared_from_this();
  for (std::size_t place = 0; place < servers_.size(); ++place) {
    Portion& portion = operation.portions[options_.index * servers_.size() + place];
    if (portion.unfinished > 0) cancel(portion, *servers_[place]);
  }
}

// Once. What was never sent to a server that is lost, or is being fenced, is over at once.
void WorkerLoop::cancel(Transfer& transfer, ServerConnection& server) {
  if (std::exchange(transfer.cancelled, true)) return;
  server.queue.remove(&transfer);
  while (StagingBuffer* unsent = transfer.encoded) {
    transfer.encoded = std::exchange(unsent->next, nullptr);
    server.memory.give_back(unsent);
  }
  const bool lost = server.is_closed();
  if (lost || server.loss.is_known()) {
    const bool all = transfer.unsent() == transfer.unfinished;
    drop_unsent(transfer);
    if (lost || all) return;
  }
  send_cancel(transfer, server);
}

// Tells the server which partitions are not waited for any more, those that were never sent among them: other ranks may
// wait for them there.
void WorkerLoop::send_cancel(Transfer& transfer, ServerConnection& server) {
  server.send_landed();  // what other members wait for may be complete
  tensor::Cancel message = transfer.make_cancel();
  message.for_host = transfer.parts.front().for_host();
  const auto send = [&] {
    (void)server.send(message);
    message.partitions.clear();
  };
  const auto add = [&](std::uint32_t index) {
    owe(in_flight_[index], InFlight::Owed::kReply);
    const Part& part = in_flight_[index].part;
    if (part.for_host() != message.for_host && !message.partitions.empty()) send();
    message.for_host = part.for_host();
    message.partitions.push_back({in_flight_.immediate_of(index), part.partition, part.for_host() ? part.place : 0});
    if (message.partitions.size() == tensor::kMostCancelled) send();
  };
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    if (in_flight_[i].transfer == &transfer) add(i);
  }
  for (; transfer.unsent() > 0; ++transfer.next) {
    const std::uint32_t index = in_flight_.allocate();
    InFlight& entry = in_flight_[index];
    entry.transfer = &transfer;
    entry.server = &server;
    entry.part = transfer.parts[transfer.next];
    entry.stage = InFlight::Stage::kNeverSent;
    server.outstanding.note_sent(0);
    add(index);
  }
  if (!message.partitions.empty()) send();
}

void WorkerLoop::drop_unsent(Transfer& transfer) {
  const std::uint32_t unsent = transfer.unsent();
  if (unsent == 0) return;
  if (survives_server(transfer.finality)) {
    for (const Part& part : transfer.parts.subspan(transfer.next)) (void)transfer.suspend(part.partition, {}, true);
  }
  transfer.next += unsent;
  transfer.finish(unsent, false, counters_);
}

// ---- Contributions that are given up

void WorkerLoop::cancel(std::uint32_t number, const Error& why) {
  HostContribution* contribution = contributions_.find(number);
  if (contribution == nullptr) return;
  abort(*contribution, *contribution->server, why.code(), why.what(), why.hint());
}

void WorkerLoop::refuse(const tensor::PushHeader& header, std::uint32_t place, const Error& why) {
  ServerConnection* server = open_server(place);
  if (server == nullptr || server->loss.is_known()) return;
  HostContribution& nobodys = contributions_.make(HostContributions::kNobody, header, 0, *server);
  abort(nobodys, *server, why.code(), why.what(), why.hint());
}

void WorkerLoop::abort_operations(const std::function<bool(const Operation&)>& concerns, ErrorCode code,
                                  const std::string& what, const std::string& hint) {
  take_submissions();
  const std::vector<std::shared_ptr<Operation>> watched(watched_.begin(), watched_.end());
  for (const auto& operation : watched) {
    if (!operation->done() && concerns(*operation)) abort(*operation, code, what, hint);
  }
}

void WorkerLoop::end_view(const Error& why) {
  view_ended_ = why;
  contributions_.end_view(why);
  abort_operations([](const Operation&) { return true; }, why.code(), why.what(), why.hint());
  for (const auto& server : servers_) {
    if (!server) continue;
    for (HostContribution* contribution : contributions_.to(*server)) {
      abort(*contribution, *server, why.code(), why.what(), why.hint());
    }
    if (server->loss.is_reported() && !server->loss.is_known()) lose(*server, why.what());
  }
}

Error WorkerLoop::loss(const std::string& why) const {
  return view_ended_.value_or(Error(ErrorCode::kPeerLost, why, kRestartJob));
}

// ---- Deadlines and silence

void WorkerLoop::check_deadlines() {
  watched_.purge();
  const std::vector<std::shared_ptr<Operation>> watched(watched_.begin(), watched_.end());
  for (const auto& operation : watched) {
    if (operation->done() || operation->is_failing()) continue;
    if (operation->completion.is_given_up()) {
      abort(*operation, ErrorCode::kPeerLost, "its caller was interrupted", "call it again on every rank of the group");
    }
    if (!operation->deadline.passed()) continue;
    abort(*operation, ErrorCode::kTimeout, "not complete within " + in_words(operation->request.timeout_s),
          "check that every rank of the group calls it, or raise BPS_TIMEOUT");
  }
  send_landed();  // where the rest of an operation takes long
  check_replies();
}

void WorkerLoop::check_replies() {
  const auto now = Clock::now();
  const bool was_stopped = now - std::exchange(last_check_, now) > Silence::kPingAfter;
  if (is_owed_) check_owed(now, was_stopped);
  for (const auto& server : servers_) {
    if (!server || server->is_closed()) continue;
    if (server->loss.is_known()) {
      if (server->loss.is_ending() || server->loss.is_due()) end_all_of(*server);
      continue;
    }
    const Silence::Verdict verdict = server->silence.judge(now, server->owes_reply(), was_stopped);
    if (verdict == Silence::Verdict::kNothing) continue;
    if (verdict == Silence::Verdict::kLost) {
      on_lost(*server, "it has not replied for " + in_words(seconds(server->silence.length(now))) +
                           " by the data network (" + server->route + ") although the connection is open");
      continue;
    }
    if (verdict == Silence::Verdict::kPingAndReport && when_silent) when_silent(server->node);
    (void)server->send(tensor::Ping{});
  }
}

void WorkerLoop::owe(InFlight& entry, InFlight::Owed what) {
  const double silences = silences_until(what, entry.part.for_host());
  const double transfer_s = static_cast<double>(entry.server->outstanding.bytes()) / kSlowestLink;
  entry.owed = what;
  entry.due = Deadline::after(silences * options_.silence_s + transfer_s).at();
  is_owed_ = true;
}

// A server that replies to pings owes something else: nothing but this would ever end that wait.
void WorkerLoop::check_owed(Clock::time_point now, bool was_stopped) {
  is_owed_ = false;
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    InFlight& entry = in_flight_[i];
    if (entry.transfer == nullptr || entry.owed == InFlight::Owed::kNothing) continue;
    is_owed_ = true;
    if (was_stopped) entry.due = std::max(entry.due, now + to_duration(options_.silence_s));
    ServerConnection& server = *entry.server;
    if (now < entry.due || server.is_closed() || server.loss.is_known() || server.silence.is_expected(now)) continue;
    const std::string what = entry.owed == InFlight::Owed::kAnswer ? "an answer that it has posted did not arrive"
                             : entry.owed == InFlight::Owed::kReply
                                 ? "it did not reply to an operation that was given up"
                                 : "it did not tell what became of an operation that was given up";
    const double silences = silences_until(entry.owed, entry.part.for_host());
    on_lost(server, what + " within " + in_words(silences * options_.silence_s) + " by the data network (" +
                        server.route + ") although the connection is open");
  }
}

void WorkerLoop::on_reachable(std::uint32_t node) {
  for (const auto& server : servers_) {
    if (server && server->node == node) server->silence.note_reachable(Clock::now());
  }
}

// ---- What servers say

void WorkerLoop::on_message(ServerConnection& server, std::span<const std::byte> message) {
  const auto decoded = tensor::decode(message, options_.epoch);
  if (!decoded) {
    counters_.stale.add();
  } else if (const auto* credits = std::get_if<tensor::Credits>(&*decoded)) {
    server.add_slots(*credits);
    has_work_ = true;
  } else if (const auto* path = std::get_if<tensor::PathLost>(&*decoded)) {
    settle(server, *path);
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
    if (contributions_.source() == nullptr) return;
    contributions_.source()->fail_round(round->group, round->tensor, round->partition, round->round,
                                        Error(round->code, round->what, round->hint));
  }
}

void WorkerLoop::on_push_failed(ServerConnection& server, const tensor::PushFailed& failed) {
  if (failed.immediate == tensor::kWholeSession) return on_lost(server, failed.what + " (" + failed.hint + ")");
  const InFlight* entry = find(failed.immediate, server);
  if (entry == nullptr) return;
  // A relay does not know either what becomes of its host's contribution when the view ends.
  const bool is_undecided = entry->part.for_host() && failed.code == ErrorCode::kRoundAborted;
  fail_answered(failed.immediate, Error(failed.code, failed.what, failed.hint),
                is_undecided ? InFlight::End::kUndecided : InFlight::End::kAborted);
}

// The server says no more about this partition. What else belongs to the operation is given up.
void WorkerLoop::fail_answered(std::uint32_t immediate, const Error& why, InFlight::End end) {
  const std::uint32_t index = InFlightTable::index_of(immediate);
  Transfer& transfer = *in_flight_[index].transfer;
  const auto alive = transfer.operation == nullptr ? nullptr : transfer.operation->shared_from_this();
  const bool first = transfer.fail(why.code(), why.what(), why.hint());
  end_when_unread(index, end);
  if (!first || !alive) return;
  if (when_failing) when_failing(alive);
  cancel(*alive);
}

Error WorkerLoop::codec_failure() const {
  return {ErrorCode::kInvalidArgument, compress::CodecCall::take_failure() + " on " + options_.name,
          compress::kMendCodec};
}

// Of what was answered, the answers are on their way. The server says that of every round that is over, also where this
// worker has sent nothing that could have been answered. What is pending is decided by others.
void WorkerLoop::on_cancelled(ServerConnection& server, const tensor::Cancelled& cancelled) {
  for (const std::uint32_t immediate : cancelled.aborted) {
    const InFlight* entry = in_flight_.find(immediate, server);
    if (entry == nullptr) continue;  // an error that was sent before has ended it
    if (!cancelled.missing.empty()) entry->transfer->note_missing(server.name, cancelled.missing);
    end_when_unread(InFlightTable::index_of(immediate));
  }
  for (const std::uint32_t immediate : cancelled.answered) {
    InFlight* entry = in_flight_.find(immediate, server);
    if (entry == nullptr) continue;  // it has arrived
    if (!entry->was_sent()) {
      end_when_unread(InFlightTable::index_of(immediate));
      continue;
    }
    owe(*entry, InFlight::Owed::kAnswer);
  }
  for (const std::uint32_t immediate : cancelled.pending) {
    InFlight* entry = in_flight_.find(immediate, server);
    if (entry != nullptr) owe(*entry, InFlight::Owed::kOutcome);
  }
}

}  // namespace bps::worker
