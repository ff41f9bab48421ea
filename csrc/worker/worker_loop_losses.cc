// SPDX-License-Identifier: Apache-2.0
// What goes wrong on a worker loop: deadlines, refused pushes, lost servers. The data path is sender.cc and
// worker_loop.cc.
#include <string>

#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

constexpr double kAnswerGrace_s = 1.0;  // for the server to say who is missing

constexpr const char* kRestart = "restart the job from its last checkpoint";

}  // namespace

void WorkerLoop::check_deadlines() {
  watched_.purge();
  for (const auto& operation : watched_) {
    if (operation->done() || !operation->deadline.passed()) continue;
    const auto late = Clock::now() - operation->deadline.at();
    if (!operation->asked.exchange(true)) {
      ask_who_is_missing(*operation);
    } else if (late > std::chrono::duration<double>(kAnswerGrace_s)) {
      operation->fail(ErrorCode::kTimeout, "not complete within " + std::to_string(operation->request.timeout_s) + " s",
                      "check that every rank of the group calls it, or raise BPS_TIMEOUT");
    }
  }
}

// Asks one server that still owes an answer; its reply fails the operation with the names of the missing ranks.
void WorkerLoop::ask_who_is_missing(const Operation& operation) {
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    const InFlight& entry = in_flight_[i];
    if (entry.cursor == nullptr || entry.cursor->operation != &operation || entry.server->is_lost()) continue;
    (void)entry.server->send(
        tensor::WhoIsMissing{in_flight_.immediate_of(i), operation.tensor->id, entry.partition, operation.round});
    return;
  }
}

void WorkerLoop::on_message(ServerConnection& server, std::span<const std::byte> message) {
  const auto decoded = tensor::decode(message);
  if (!decoded) {
    counters_.stale.add();
  } else if (const auto* credits = std::get_if<tensor::Credits>(&*decoded)) {
    for (const tensor::SlotCredit& slot : credits->slots) server.add_slot(slot);
    has_work_ = true;
  } else if (const auto* failed = std::get_if<tensor::PushFailed>(&*decoded)) {
    on_push_failed(server, *failed);
  } else if (const auto* missing = std::get_if<tensor::Missing>(&*decoded)) {
    on_missing(server, *missing);
  }
}

void WorkerLoop::on_push_failed(ServerConnection& server, const tensor::PushFailed& failed) {
  if (failed.immediate == tensor::kWholeSession) return on_lost(server, failed.what + " (" + failed.hint + ")");
  const InFlight* entry = find(failed.immediate, server);
  if (entry == nullptr) return;
  entry->cursor->operation->fail(failed.code, failed.what, failed.hint);
  complete(InFlightTable::index_of(failed.immediate));
}

void WorkerLoop::on_missing(ServerConnection& server, const tensor::Missing& missing) {
  const InFlight* entry = find(missing.immediate, server);
  if (entry == nullptr) return;
  Operation& operation = *entry->cursor->operation;
  std::string ranks;
  for (const std::uint32_t rank : missing.ranks) ranks += (ranks.empty() ? " " : ", ") + std::to_string(rank);
  operation.fail(ErrorCode::kTimeout,
                 "after " + std::to_string(static_cast<int>(operation.request.timeout_s)) + " s " + server.name +
                     " still waits for rank" + (ranks.empty() ? "s it knows nothing of" : ranks),
                 "check that those ranks are alive and call the same operation, or raise BPS_TIMEOUT");
}

void WorkerLoop::fail_operations(const std::function<bool(const Operation&)>& concerns, ErrorCode code,
                                 const std::string& what, const std::string& hint) {
  take_submissions();
  for (const auto& operation : watched_) {
    if (!operation->done() && concerns(*operation)) operation->fail(code, what, hint);
  }
}

void WorkerLoop::on_lost(ServerConnection& server, const std::string& why) {
  if (server.is_lost()) return;
  if (!when_lost) return lose(server, server.name + " is lost: " + why);
  // Operations wait until lose_server() tells the cause, which may be the loss of another member.
  server.abandon();
  when_lost(server.rank, why);
}

void WorkerLoop::lose_server(std::uint32_t rank, const std::string& why) {
  for (const auto& server : servers_) {
    if (server && server->rank == rank && server->why_lost().empty()) lose(*server, why);
  }
}

void WorkerLoop::lose(ServerConnection& server, const std::string& why) {
  // The caller gets the memory back now, so nobody may write into it any more, alive as the server may be.
  server.lose(why);
  const auto fail = [&](Operation& operation) { operation.fail(ErrorCode::kPeerLost, why, kRestart); };
  for (Operation::Cursor* cursor : server.queue.take_all()) {
    fail(*cursor->operation);
    finish(*cursor, cursor->unsent(), counters_);
  }
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    const InFlight& entry = in_flight_[i];
    if (entry.cursor == nullptr || entry.server != &server) continue;
    fail(*entry.cursor->operation);
    complete(i);
  }
}

}  // namespace bps::worker
