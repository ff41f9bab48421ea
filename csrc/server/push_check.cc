#include "server/push_check.h"

namespace bps::server {

const char* find_fault(const tensor::PushHeader& header, const PushLimits& limits) {
  const std::size_t element = size_of(header.dtype);
  const bool pushes = (header.flags & tensor::kIsPush) != 0;
  const bool pulls = (header.flags & tensor::kIsPull) != 0;
  const bool has_payload = (header.flags & tensor::kHasPayload) != 0;
  if (header.version != transport::kProtocolVersion) return "it has another protocol version";
  if (element == 0 || !is_valid(header.op)) return "its dtype or operation is unknown";
  if (header.length == 0 || header.length > limits.largest_partition || header.length % element != 0) {
    return "its length is not allowed";
  }
  if (limits.group == nullptr || header.member >= limits.group->size() ||
      limits.group->ranks[header.member] != limits.sender_rank) {
    return "its group is unknown or does not contain the sender";
  }
  if ((!pushes && !pulls) || (has_payload && !pushes)) return "its flags contradict each other";
  if (has_payload && (limits.landed ? limits.room < header.length : limits.room != header.length)) {
    return "its payload is not as long as its header says";
  }
  return nullptr;
}

}  // namespace bps::server
