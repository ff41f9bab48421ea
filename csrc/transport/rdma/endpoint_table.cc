// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/endpoint_table.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "transport/rdma/rdma_control.h"

namespace bps::transport::rdma {

void EndpointTable::add(std::unique_ptr<RcEndpoint> endpoint) {
  by_number_[endpoint->connection.queue_pair().number()] = endpoint.get();
  endpoint->connection.id()->context = endpoint.get();
  open_.push_back(std::move(endpoint));
}

void EndpointTable::close(const Endpoint* endpoint) {
  const auto found = std::ranges::find_if(open_, [&](const auto& owned) { return owned->endpoint() == endpoint; });
  if (found == open_.end()) return;
  std::erase_if(by_number_, [&](const auto& entry) { return entry.second == found->get(); });
  (*found)->closed = true;
  (*found)->connection.break_off();
  (*found)->drop();
  closed_.push_back(std::move(*found));
  open_.erase(found);
}

RcEndpoint* EndpointTable::by_queue_pair(const ibv_qp* queue_pair) const {
  for (const auto& endpoint : open_) {
    if (endpoint->connection && endpoint->connection.queue_pair().get() == queue_pair) return endpoint.get();
  }
  return nullptr;
}

bool EndpointTable::awaits_completions() const {
  return std::ranges::any_of(open_, [](const auto& endpoint) { return endpoint->awaits_completions(); });
}

int EndpointTable::begin_turn() {
  int found = 0;
  turning_.swap(state_.in_turn);  // both keep their capacity
  for (RcEndpoint* endpoint : turning_) found += endpoint->begin_turn();
  turning_.clear();
  return found;
}

// The device tries again for longer than anybody wants to wait, on some devices for ever. So this finds out whether the
// network still carries what each path sends. A write that is not acknowledged shows nothing yet: a slow link takes its
// time for a large one, and a peer without receive requests lets it wait. So the control connection of its path is
// asked, by a message of its own. It is asked less and less often, because that takes a buffer of the peer.
void EndpointTable::look_for_silence() {
  for (const auto& endpoint : open_) {
    if (endpoint->is_lost()) continue;
    endpoint->look();
    const std::uint32_t missed = endpoint->acknowledgements.missed();
    if (!endpoint->endpoint()->is_data_plane || !std::has_single_bit(missed)) continue;
    const Hello& data = endpoint->endpoint()->hello;
    for (const auto& other : open_) {
      const Hello& control = other->endpoint()->hello;
      if (other->endpoint()->is_data_plane || control.path != data.path || control.node != data.node ||
          control.client_loop != data.client_loop || control.server_loop != data.server_loop) {
        continue;
      }
      static_cast<RdmaControl&>(*other).probe();
    }
  }
}

void EndpointTable::lose_all(const std::string& why) {
  for (const auto& endpoint : open_) endpoint->lose(why);
}

RcEndpoint* EndpointTable::next_loss() const {
  RcEndpoint* next = nullptr;
  for (const auto& endpoint : open_) {
    if (!endpoint->is_lost() || endpoint->finished || endpoint->holds_messages()) continue;
    if (next == nullptr || endpoint->loss < next->loss) next = endpoint.get();
  }
  return next;
}

int EndpointTable::tell_losses(const std::string& detail) {
  int told = 0;
  // The sinks may close endpoints and note more losses, so everything is looked at again after each one.
  while (RcEndpoint* endpoint = next_loss()) {
    endpoint->finished = true;
    ++told;
    std::erase_if(by_number_, [&](const auto& entry) { return entry.second == endpoint; });
    if (endpoint->connection) endpoint->connection.break_off();
    endpoint->give_up_sends();
    endpoint->drop();
    endpoint->tell_loss(detail);
  }
  state_.losses_due = std::ranges::any_of(
      open_, [](const auto& one) { return one->is_lost() && !one->finished && one->holds_messages(); });
  return told;
}

void EndpointTable::drop_all() {
  for (auto* list : {&open_, &closed_}) {
    for (const auto& endpoint : *list) {
      if (endpoint->connection) endpoint->connection.break_off();
      endpoint->drop();
    }
  }
  by_number_.clear();
}

}  // namespace bps::transport::rdma
