// SPDX-License-Identifier: Apache-2.0
#include "server/push_check.h"

namespace bps::server {

namespace {

// Whether the sender may contribute in the name of the member that the header says.
bool may_contribute(const tensor::PushHeader& header, const PushLimits& limits) {
  const RoundGroup& group = *limits.group;
  const bool for_host = (header.flags & tensor::kForHost) != 0;
  const van::Contributors& contributors = group.contributors(for_host);
  if (!for_host && !contributors.has_hosts()) {  // nothing is shared: everybody speaks for himself
    return header.member < group.group.size() && group.group.ranks[header.member] == limits.sender_rank;
  }
  const std::uint32_t index = contributors.of_member(header.member);
  if (index == van::Contributors::kNone) return false;
  const van::Contributor& contributor = contributors[index];
  if (!contributor.is_host()) {
    return group.group.ranks[header.member] == limits.sender_rank && (!for_host || limits.direct);
  }
  return header.member == contributor.members.front() && limits.hosts->host_of(limits.sender_rank) == contributor.host;
}

}  // namespace

const char* find_fault(const tensor::PushHeader& header, const PushLimits& limits) {
  if (!codec::accepts(header)) return "its version, dtype, operation, flags or length is not one that a worker sends";
  if (header.length > limits.largest_partition) return "it is longer than the largest partition";
  if (limits.group == nullptr || !may_contribute(header, limits)) {
    return "its group is unknown or does not contain the sender";
  }
  const bool has_payload = (header.flags & tensor::kHasPayload) != 0;
  if (has_payload && (limits.landed ? limits.room < header.length : limits.room != header.length)) {
    return "its payload is not as long as its header says";
  }
  return nullptr;
}

}  // namespace bps::server
