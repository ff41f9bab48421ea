// SPDX-License-Identifier: Apache-2.0
// Holds the endpoints of an RDMA transport. It finds them by their queue pairs, tells their losses in order, and keeps
// each for as long as a callback of it can be running. Belongs to the thread of the loop.
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
  // Calls nothing of the endpoint after this. Has no effect on an endpoint that is not here.
  void close(const Endpoint* endpoint);
  // Must be called where no callback of an endpoint can be running.
  void destroy_closed() { closed_.clear(); }

  // Returns null when the queue pair is gone.
  RcEndpoint* by_number(std::uint32_t queue_pair) const {
    const auto found = by_number_.find(queue_pair);
    return found == by_number_.end() ? nullptr : found->second;
  }
  RcEndpoint* by_queue_pair(const ibv_qp* queue_pair) const;
  // See RcEndpoint.
  bool awaits_completions() const;
  int begin_turn();

  // Asks paths that may be lost one by one for a sign of life, if they have acknowledged nothing for a while.
  void look_for_silence();
  void lose_all(const std::string& why);
  // Tells the losses that were noted since. `detail` is added to each. Returns how many it told.
  int tell_losses(const std::string& detail);
  // Ends all connections and releases all memory, because the device goes.
  void drop_all();

 private:
  RcEndpoint* next_loss() const;

  TransportState& state_;
  std::vector<std::unique_ptr<RcEndpoint>> open_;
  std::vector<std::unique_ptr<RcEndpoint>> closed_;
  std::unordered_map<std::uint32_t, RcEndpoint*> by_number_;
  std::vector<RcEndpoint*> turning_;  // those that begin_turn() goes through
};

}  // namespace bps::transport::rdma
