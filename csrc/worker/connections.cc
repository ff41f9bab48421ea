// SPDX-License-Identifier: Apache-2.0
#include "worker/connections.h"

#include <algorithm>

namespace bps::worker {

ServerConnection& Connections::add(std::size_t place, Receiver& receiver, ServerConnection::Server server,
                                   transport::Transport& transport) {
  has_own_server_ |= transport.kind() == transport::Kind::kSelf;
  by_place_[place] = std::make_unique<ServerConnection>(receiver, std::move(server), memory_of(transport));
  all_.clear();
  for (const auto& one : by_place_) {
    if (one) all_.push_back(one.get());
  }
  return *by_place_[place];
}

TransportMemory& Connections::memory_of(transport::Transport& transport) {
  const auto known = std::ranges::find_if(memory_, [&](const auto& one) { return &one->transport() == &transport; });
  if (known != memory_.end()) return **known;
  return *memory_.emplace_back(std::make_unique<TransportMemory>(transport, buffer_bytes_, staging_bytes_));
}

std::size_t Connections::place_of(const ServerConnection& server) const {
  const auto found = std::ranges::find_if(by_place_, [&](const auto& one) { return one.get() == &server; });
  return static_cast<std::size_t>(found - by_place_.begin());
}

ServerConnection* Connections::find_connected(std::size_t place) const {
  if (place >= by_place_.size() || !by_place_[place] || by_place_[place]->paths.streams().empty()) return nullptr;
  return by_place_[place].get();
}

ServerConnection* Connections::find_usable(std::size_t place) const {
  ServerConnection* server = place < by_place_.size() ? by_place_[place].get() : nullptr;
  return server == nullptr || server->is_closed() || server->loss.is_known() ? nullptr : server;
}

void Connections::forget_memory(std::uint64_t identity) {
  for (const auto& memory : memory_) memory->regions.forget(identity);
}

void Connections::drop_freed_of_devices() {
  for (const auto& memory : memory_) memory->device_regions.drop_freed();
}

std::uint64_t Connections::registered_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& memory : memory_) bytes += memory->registered_bytes();
  return bytes;
}

void Connections::send_words() {
  for (ServerConnection* server : all_) {
    if (server->is_closed()) continue;
    if (is_receipt_due_ && server->paths.fails_over()) server->send_receipts();
    if (is_landed_due_) server->send_landed();
  }
  is_receipt_due_ = is_landed_due_ = false;
}

}  // namespace bps::worker
