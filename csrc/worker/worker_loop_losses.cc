// SPDX-License-Identifier: Apache-2.0
// What a worker loop loses: paths to a server, and servers; and what it keeps of the results that were on their way.
#include <algorithm>
#include <cstring>
#include <string>

#include "core/log.h"
#include "worker/worker_loop.h"

namespace bps::worker {

// ---- Lost paths

void WorkerLoop::check_paths() {
  for (const auto& server : servers_) {
    if (server && server->paths.fails_over()) server->check_paths();
  }
}

void WorkerLoop::send_receipts() {
  receipts_due_ = false;
  for (const auto& server : servers_) {
    if (server && server->paths.fails_over() && !server->is_closed()) server->send_receipts();
  }
}

std::vector<tensor::AnswerKeys::Key> WorkerLoop::answer_keys(const ServerConnection& server, std::size_t rail,
                                                             std::size_t other) const {
  std::vector<tensor::AnswerKeys::Key> keys;
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    const InFlight& entry = in_flight_[i];
    if (entry.transfer == nullptr || entry.server != &server || !entry.was_sent()) continue;
    const tensor::Placement placement = entry.transfer->place(entry.part);
    if (!placement.wants_data()) continue;
    keys.push_back({answer_span(entry, placement, rail).key, answer_span(entry, placement, other).key});
  }
  std::ranges::sort(keys);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());  // not by ranges: clang 14 refuses that
  return keys;
}

void WorkerLoop::on_unread(ServerConnection& server, std::uint32_t immediate) {
  on_written(server, immediate);
}

// Both ends are closed: what the path has not delivered goes out by the others.
void WorkerLoop::settle(ServerConnection& server, const tensor::PathLost& lost) {
  const auto path = server.settle(lost);
  if (!path) return;
  // Only now: of a server that ends all paths are lost, one after the other.
  counters_.paths_lost.add();
  log_warning("a rail to " + server.name + " is lost: " + path->why_lost + "; the other rails are used");
  has_work_ = true;
  std::vector<transport::Endpoint*> closed(path->data.begin(), path->data.end());
  closed.push_back(path->control);
  reactor_.loop().post([&transport = server.memory.transport(), closed = std::move(closed)] {
    for (transport::Endpoint* endpoint : closed) transport.close(endpoint);
  });
  const auto place = std::ranges::find_if(servers_, [&](const auto& one) { return one.get() == &server; });
  if (when_path_lost) when_path_lost(static_cast<std::size_t>(place - servers_.begin()), path->pair);
}

ServerConnection* WorkerLoop::find_server(std::size_t place) {
  ServerConnection* server = place < servers_.size() ? servers_[place].get() : nullptr;
  return server == nullptr || server->is_closed() || server->loss.is_known() ? nullptr : server;
}

void WorkerLoop::add_path(ServerConnection& server, ServerPath path) {
  log_info("a connection to " + server.name + " that was lost is back");
  server.add_path(std::move(path));
}

// ---- Lost servers

void WorkerLoop::on_lost(ServerConnection& server, const std::string& why) {
  if (server.is_closed()) return;
  if (server.loss.is_known()) return end_all_of(server);  // it was being fenced, and has gone by itself
  // The end of the view is the cause, and nobody will name another one.
  if (!when_lost || view_ended_) return lose(server, server.name + " is lost: " + why);
  // Operations wait until lose_server() tells the cause, which may be the loss of another member.
  server.loss.report();
  if (!server.needs_fence()) server.close();
  when_lost(server.node, why);
}

void WorkerLoop::lose_server(std::uint32_t node, const std::string& why) {
  for (const auto& server : servers_) {
    if (server && server->node == node && !server->loss.is_known()) lose(*server, why);
  }
}

// Operations that this server has a part in cannot complete. Their memory is the caller's again when the server can
// write to it no more: at once where closing the connection does that; a process of this host, which may live on, is
// first asked, then stopped.
void WorkerLoop::lose(ServerConnection& server, const std::string& why) {
  server.loss.learn(why);
  std::vector<std::shared_ptr<Operation>> concerned;
  const auto add = [&](const Transfer* transfer) {
    if (transfer->operation != nullptr) concerned.push_back(transfer->operation->shared_from_this());
  };
  for (Transfer* transfer : server.queue.take_all()) add(transfer);
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    if (in_flight_[i].server == &server) add(in_flight_[i].transfer);
  }
  const Error error = loss(why);
  for (const auto& operation : concerned) abort(*operation, error.code(), error.what(), error.hint());
  for (HostContribution* contribution : contributions_.to(server)) {
    abort(*contribution, server, error.code(), error.what(), error.hint());
  }
  // Of what failed before, for another reason, the part that was never sent is over as well.
  for (const auto& operation : concerned) cancel(*operation);
  if (!server.needs_fence() || server.is_closed()) end_all_of(server);
}

// Nothing that is still under way to this server will be answered. A process is ended for the sake of callers' memory
// only: not for what lies in staging buffers, as the contributions of a host do, nor for what it was never sent.
void WorkerLoop::end_all_of(ServerConnection& server) {
  bool reaches_callers = false;
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    const InFlight& entry = in_flight_[i];
    if (entry.server != &server) continue;
    const Transfer& transfer = *entry.transfer;
    // A redo log says something once the server has ended.
    const bool is_in_place = entry.staged == nullptr || transfer.route == Route::kAnswersAside;
    reaches_callers |= entry.was_sent() && (is_in_place || transfer.finality == Finality::kLogged);
  }
  if (reaches_callers && server.fence()) return;  // several end at once, and the loop goes on meanwhile
  server.close();
  std::vector<std::uint32_t> entries;
  for (std::uint32_t i = 0; i < in_flight_.size(); ++i) {
    if (in_flight_[i].server == &server) entries.push_back(i);
  }
  // Staging buffers that it may still write to are never used again.
  for (const std::uint32_t i : entries) {
    if (!server.needs_fence() || in_flight_[i].staged == nullptr || in_flight_[i].has_landed()) continue;
    in_flight_[i].staged = nullptr;
  }
  for (const std::uint32_t i : entries) end_unanswered(i);
}

// ---- What is left of a result whose round has not ended here

// What the server had written, or was about to write, when it ended; or when it failed the round, after which it writes
// nothing of it.
Landed WorkerLoop::redo(const InFlight& entry) {
  const Transfer& transfer = *entry.transfer;
  const tensor::Placement placement = transfer.place(entry.part);
  const bool has_ended = entry.server->is_closed() && !entry.server->needs_fence();
  if (!(has_ended || entry.end != InFlight::End::kOpen) || !entry.was_sent() || !placement.wants_data()) return {};
  const auto last = entry.server->log.log().last_of(trace_key(transfer, entry.part), placement.length);
  if (!last) return {};
  std::byte* to = entry.staged != nullptr ? entry.staged->bytes() : transfer.output_bytes + placement.output_offset;
  std::memcpy(to + last->at, last->block.data(), last->block.size());
  if (entry.staged == nullptr) return {nullptr, last->end()};
  return {last->end() == placement.length ? entry.staged->memory : nullptr, 0};
}

// Whether its buffer is needed in the next view.
bool WorkerLoop::suspend(std::uint32_t index) {
  const InFlight& entry = in_flight_[index];
  const Landed landed = landed_of(index);
  const bool failed = entry.end == InFlight::End::kAborted || !entry.was_sent();
  return entry.transfer->suspend(entry.part.partition, landed, failed) && landed.aside;
}

// From here on nothing more of it comes.
Landed WorkerLoop::landed_of(std::uint32_t index) {
  InFlight& entry = in_flight_[index];
  if (entry.transfer->finality == Finality::kLogged) return redo(entry);
  if (entry.staged != nullptr) return {entry.has_landed() ? entry.staged->memory : nullptr, 0};
  if (entry.has_landed()) return {nullptr, entry.answer_length};
  return {nullptr, std::max(entry.cut_off, entry.server->stop_landing(in_flight_.immediate_of(index)))};
}

}  // namespace bps::worker
