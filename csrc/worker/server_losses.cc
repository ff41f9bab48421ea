// SPDX-License-Identifier: Apache-2.0
#include "worker/server_losses.h"

#include <memory>
#include <utility>
#include <vector>

#include "core/log.h"

namespace bps::worker {

void ServerLosses::settle(ServerConnection& server, const tensor::PathLost& lost) {
  const auto path = server.settle(lost);
  if (!path) return;
  // A server that ends loses all paths, one after the other, and none of them is settled.
  reactor_.counters().paths_lost.add();
  log_warning("a rail to " + server.name + " is lost: " + path->why_lost + "; the other rails are used");
  connections_.note_work();
  std::vector<transport::Endpoint*> closed(path->data.begin(), path->data.end());
  closed.push_back(path->control);
  reactor_.loop().post([&transport = server.memory.transport(), closed = std::move(closed)] {
    for (transport::Endpoint* endpoint : closed) transport.close(endpoint);
  });
  if (events_.when_path_lost) events_.when_path_lost(connections_.place_of(server), path->pair);
}

void ServerLosses::report(ServerConnection& server, const std::string& why) {
  if (server.is_closed()) return;
  if (server.loss.is_known()) return end_all_of(server);  // it was being fenced, and has gone by itself
  // The end of the view is the cause, and nobody will name another one.
  if (!events_.when_lost || connections_.has_view_ended()) return lose(server, server.name + " is lost: " + why);
  // Operations wait until lose() tells the cause, which may be the loss of another member.
  server.loss.report();
  if (!server.needs_fence()) server.close();
  events_.when_lost(server.node, why);
}

void ServerLosses::lose(std::uint32_t node, const std::string& why) {
  for (ServerConnection* server : connections_.all()) {
    if (server->node == node && !server->loss.is_known()) lose(*server, why);
  }
}

// Ends operations in which this server has a part, which cannot complete. Their memory is the caller's again when the
// server can write to it no more. Closing the connection achieves that at once, except for a process of this host,
// which may live on. That is first asked, then stopped.
void ServerLosses::lose(ServerConnection& server, const std::string& why) {
  server.loss.learn(why);
  std::vector<std::shared_ptr<Operation>> concerned;
  const auto add = [&](const Transfer* transfer) {
    if (transfer->operation != nullptr) concerned.push_back(transfer->operation->shared_from_this());
  };
  for (Transfer* transfer : server.queue.take_all()) add(transfer);
  for (Transfer* transfer : server.fetching.take_all()) add(transfer);
  copies_.for_each_fetching(server, [&](const Transfer& transfer) { add(&transfer); });
  for (std::uint32_t i = 0; i < partitions_.table.size(); ++i) {
    if (partitions_.table[i].server == &server) add(partitions_.table[i].transfer);
  }
  const Error error = connections_.failure_of(server);
  for (const auto& operation : concerned) cancellation_.abort(*operation, error);
  for (HostContribution* contribution : contributions_.to(server)) cancellation_.abort(*contribution, server, error);
  // The part that was never sent is over, too, where an operation had failed before, for another reason.
  for (const auto& operation : concerned) cancellation_.cancel(*operation);
  if (!server.needs_fence() || server.is_closed()) end_all_of(server);
}

void ServerLosses::end_view(const Error& why) {
  for (ServerConnection* server : connections_.all()) {
    for (HostContribution* contribution : contributions_.to(*server)) cancellation_.abort(*contribution, *server, why);
    if (server->loss.is_reported()) lose(*server, why.what());
  }
}

void ServerLosses::end_due() {
  for (ServerConnection* server : connections_.all()) {
    if (server->is_closed() || !server->loss.is_known()) continue;
    if (server->loss.is_ending() || server->loss.is_due()) end_all_of(*server);
  }
}

// Ends a process only for the sake of callers' memory: not for what lies in staging buffers, as the contributions of a
// host do, nor for what it was never sent.
void ServerLosses::end_all_of(ServerConnection& server) {
  InFlightTable& table = partitions_.table;
  bool reaches_callers = false;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    const InFlight& entry = table[i];
    if (entry.server != &server || entry.is_copying()) continue;
    const Transfer& transfer = *entry.transfer;
    // A redo log says something once the server has ended.
    const bool is_in_place = entry.staged == nullptr || transfer.route == Route::kAnswersAside;
    reaches_callers |= entry.was_sent() && (is_in_place || transfer.finality == Finality::kLogged);
  }
  if (reaches_callers && server.fence()) return;  // several end at once, and the loop goes on meanwhile
  server.close();                                 // delivers what it had posted
  std::vector<std::uint32_t> entries;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    if (table[i].server == &server && !table[i].is_copying()) entries.push_back(i);
  }
  // Staging buffers to which it may still write are never used again.
  for (const std::uint32_t i : entries) {
    if (!server.needs_fence() || table[i].staged == nullptr || table[i].has_landed()) continue;
    table[i].staged = nullptr;
  }
  for (const std::uint32_t i : entries) partitions_.end_unanswered(i);
}

}  // namespace bps::worker
