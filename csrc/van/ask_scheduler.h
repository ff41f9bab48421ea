// SPDX-License-Identifier: Apache-2.0
// Asks the members of a job, by way of its scheduler, what they are doing. The caller need not be a member.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "transport/handshake.h"

namespace bps::van {

struct JobState {
  std::string scheduler;                                    // what the scheduler knows itself, as JSON
  std::vector<std::pair<std::uint32_t, std::string>> told;  // each member's node, and its report as JSON
};

// Returns when all members have replied, or at the deadline with the replies that have come. It blocks, and can be
// interrupted. Throws what find_scheduler() throws, and kPeerLost when the connection breaks before the scheduler has
// replied.
JobState ask_scheduler(const std::string& host, const std::vector<std::uint16_t>& ports,
                       const transport::Credentials& credentials, bool stacks, const Deadline& deadline);

}  // namespace bps::van
