// SPDX-License-Identifier: Apache-2.0
// Chooses the ports of this machine to use together: a pure function of what they are and of the user's wishes.
#pragma once

#include <string>
#include <vector>

#include "core/nearness.h"
#include "transport/rdma/gid.h"
#include "transport/rdma/rail.h"

namespace bps::transport::rdma {

struct RailCandidate {
  std::size_t place = 0;  // its place in BPS_RDMA_HCA
  std::uint32_t speed = 0;
  int numa_node = -1;
  Distance from_gpu{};         // from the GPU that this process works with
  std::vector<GidEntry> gids;  // those of one port
};

struct RailWish {
  GidWish gid;
  bool named = false;             // the user listed the ports, and gets all of them in that order
  std::vector<int> near_nodes{};  // the NUMA nodes that this process is bound to; empty: it is not
};

struct RailChoice {
  std::vector<Rail> rails;
  std::string why_not;  // when there are none
};

// Chooses the best port first. Then it adds, in the order of the candidates, the others that can work beside it: active
// ones, of the same kind of network, with an address of the same family. If BPS_INTERFACE names interfaces that have
// ports, it takes only those; then only those that are nearest to the GPU, unless all are far; and if the process is
// bound to NUMA nodes that have ports, only those.
RailChoice choose_rails(const std::vector<RailCandidate>& candidates, const RailWish& wish);

}  // namespace bps::transport::rdma
