// SPDX-License-Identifier: Apache-2.0
#include "server/push_check.h"

namespace bps::server {

const char* find_fault(const tensor::PushHeader& header, const PushLimits& limits) {
  if (!codec::accepts(header)) return "its version, dtype, operation, flags or length is not one that a worker sends";
  if (header.length > limits.largest_partition) return "it is longer than the largest partition";
  if (limits.group == nullptr || header.member >= limits.group->size() ||
      limits.group->ranks[header.member] != limits.sender_rank) {
    return "its group is unknown or does not contain the sender";
  }
  const bool has_payload = (header.flags & tensor::kHasPayload) != 0;
  if (has_payload && (limits.landed ? limits.room < header.length : limits.room != header.length)) {
    return "its payload is not as long as its header says";
  }
  return nullptr;
}

}  // namespace bps::server
