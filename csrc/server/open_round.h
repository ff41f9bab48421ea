// SPDX-License-Identifier: Apache-2.0
// Describes a round that a server loop has not finished, for people: what it is and whom it waits for.
#pragma once

#include <cstdint>
#include <vector>

#include "server/round.h"

namespace bps::server {

struct OpenRound {
  enum class Waits : std::uint8_t {
    kForPushes,   // those of the ranks in `missing`
    kForNetwork,  // for the answer to the contribution of this host
    kForAnswers,  // which are to leave, or to be asked for
    kForMembers,  // it has failed, and not every member knows
  };

  RoundKey key;
  std::uint32_t number = 0;
  std::int64_t since_ms = 0;  // since the first push opened it
  Waits waits = Waits::kForPushes;
  std::vector<std::uint32_t> missing;  // worker ranks
};

}  // namespace bps::server
