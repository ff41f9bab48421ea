// SPDX-License-Identifier: Apache-2.0
#include "server/push_check.h"

namespace bps::server {

bool may_contribute_for_host(const tensor::PushHeader& header, const PushLimits& limits) {
  const RoundGroup& group = *limits.group;
  const bool for_host = (header.flags & tensor::kForHost) != 0;
  const van::Contributors& contributors = group.contributors(for_host);
  const std::uint32_t index = contributors.of_position(header.position);
  if (index == van::Contributors::kNone) return false;
  const van::Contributor& contributor = contributors[index];
  if (!contributor.is_host()) {
    return group.group.ranks[header.position] == limits.sender_rank && (!for_host || limits.direct);
  }
  return header.position == contributor.positions.front() &&
         limits.hosts->host_of(limits.sender_rank) == contributor.host;
}

}  // namespace bps::server
