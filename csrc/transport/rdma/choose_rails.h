// SPDX-License-Identifier: Apache-2.0
// Chooses the ports of this machine to use together: a pure function of what they are and of the user's wishes.
#pragma once

#include <string>
#include <vector>

#include "transport/rdma/gid.h"
#include "transport/rdma/rail.h"

namespace bps::transport::rdma {

struct RailCandidate {
  std::size_t place = 0;  // in BPS_RDMA_HCA
  std::uint32_t speed = 0;
  int numa_node = -1;
  std::vector<GidEntry> gids;  // of one port
};

struct RailWish {
  GidWish gid;
  bool named = false;             // the user listed the ports, and gets them all, in that order
  std::vector<int> near_nodes{};  // the NUMA nodes that this process is bound to; empty: it is not
};

struct RailChoice {
  std::vector<Rail> rails;
  std::string why_not;  // when there are none
};

// The best port first, then the others, in the order of the candidates, that can work beside it: active, of the same
// kind of network, with an address of the same family. If the process is bound to some NUMA nodes and there are ports
// at these, only those; if BPS_INTERFACE names interfaces that have ports, only those.
RailChoice choose_rails(const std::vector<RailCandidate>& candidates, const RailWish& wish);

}  // namespace bps::transport::rdma
