// SPDX-License-Identifier: Apache-2.0
// Makes the members of a job, as tests of server loops want them.
#pragma once

#include "van/membership.h"

namespace bps::van {

// Makes worker i node i + 1.
inline Membership members_with_one_loop(std::uint32_t workers) {
  Membership members;
  members.workers = workers;
  for (std::uint32_t i = 0; i < workers; ++i) {
    Node node;
    node.id = i + 1;
    node.worker_rank = static_cast<std::int32_t>(i);
    node.worker_loops = 1;
    members.nodes.push_back(node);
  }
  return members;
}

}  // namespace bps::van
