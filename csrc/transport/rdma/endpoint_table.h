// SPDX-License-Identifier: Apache-2.0
// The endpoints of an RDMA transport: found by their queue pairs, told of their losses in the order of these, and kept
// for as long as a callback of theirs can be running. Threading: the loop's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/rdma/rdma_endpoint.h"

namespace bps::transport::rdma {

class EndpointTable {
 public:
  explicit EndpointTable(TransportState& state) : state_(state) {}

  void add(std::unique_ptr<RcEndpoint> endpoint);
  // No callbacks after this. Without effect on an endpoint that is not here.
  void close(const Endpoint* endpoint);
  // To be called where no callback of an endpoint can be running.
  void destroy_closed() { closed_.clear(); }

  // Null: of a queue pair that is gone.
  RcEndpoint* by_number(std::uint32_t queue_pair) const {
    const auto found = by_number_.find(queue_pair);
    return found == by_number_.end() ? nullptr : found->second;
  }
  RcEndpoint* by_queue_pair(const ibv_qp* queue_pair) const;
  // See RcEndpoint.
  bool awaits_completions() const;
  int begin_turn();

  // Paths that may be lost one by one: asks those that have acknowledged nothing for a while for a sign of life.
  void look_for_silence();
  void lose_all(const std::string& why);
  // Tells what was noted since; `detail` is added to each. Returns how many.
  int tell_losses(const std::string& detail);
  // The device goes: ends all connections, and releases all memory.
  void drop_all();

 private:
  RcEndpoint* next_loss() const;

  TransportState& state_;
  std::vector<std::unique_ptr<RcEndpoint>> open_;
  std::vector<std::unique_ptr<RcEndpoint>> closed_;
  std::unordered_map<std::uint32_t, RcEndpoint*> by_number_;
  std::vector<RcEndpoint*> turning_;  // in begin_turn()
};

}  // namespace bps::transport::rdma
