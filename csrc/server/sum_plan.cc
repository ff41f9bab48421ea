// SPDX-License-Identifier: Apache-2.0
#include "server/sum_plan.h"

namespace bps::server {

void SumPlan::read_from(const Round& round) {
  sources.clear();
  for (const Arrival& arrival : round.arrivals) {
    if (!arrival.has_payload) continue;
    transport::DirectAccess* direct = arrival.data->direct();
    std::byte* bytes = arrival.slot != nullptr ? arrival.slot->payload() : direct->map(arrival.span);
    sources.push_back({.bytes = bytes, .direct = direct, .span = arrival.span, .session = arrival.session});
  }
}

bool SumPlan::write_to(Round& round) {
  targets.clear();
  bool needs_slot = false;
  for (Arrival& arrival : round.arrivals) {
    transport::DirectAccess* direct = arrival.data->direct();
    const bool wants_data = (arrival.header.flags & tensor::kWantsData) != 0;
    arrival.in_place = arrival.pull_waiting && wants_data && direct != nullptr;
    if (arrival.in_place) {
      const transport::RemoteSpan span{arrival.header.answer_key, arrival.header.answer_address, round.first.length};
      targets.push_back({.bytes = direct->map(span), .direct = direct, .span = span, .session = arrival.session});
    } else if (wants_data || !arrival.pull_waiting) {
      needs_slot = true;
    }
  }
  return needs_slot;
}

}  // namespace bps::server
