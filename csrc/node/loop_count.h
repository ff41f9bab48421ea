// SPDX-License-Identifier: Apache-2.0
// Chooses the number of a worker's loops unless BPS_PUSH_THREAD says it. It is a pure function.
//
// A loop that speaks TCP has the kernel copy every byte, and fills about 10 Gbit/s in both directions. Two loops fill
// more, and get twice the processor time where processes outnumber cores. Shared memory and RDMA need one loop, and so
// do slow links: what two loops send is less even at the end of a tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bps::node {

struct LoopFacts {
  bool shares_memory = false;               // with all members, as the job has this host alone
  bool has_rdma = false;                    // to other hosts
  std::vector<std::uint32_t> interfaces{};  // those that TCP uses: speeds in Mbit/s, 0 where the driver does not tell
};

std::size_t default_worker_loops(const LoopFacts& facts);

}  // namespace bps::node
