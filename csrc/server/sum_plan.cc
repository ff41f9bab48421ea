// SPDX-License-Identifier: Apache-2.0
#include "server/sum_plan.h"

namespace bps::server {
namespace {

// Returns true when hosts average before they send. The sum of a host's ranks may exceed what float16 can hold,
// although the average of all does not. So each host averages its part by the size of the whole group.
bool averages_early(const Round& round) {
  const bool in_parts = round.key.for_host ? !round.group->ends_on_host : round.contributors->has_hosts();
  return in_parts && round.first.dtype == Dtype::kFloat16 && round.first.op == ReduceOp::kAverage;
}

}  // namespace

Reduction reduction_of(const Round& round) {
  Reduction what{round.first.dtype, round.first.op, round.group->group.size()};
  if (what.op == ReduceOp::kExactAverage && round.is_contribution()) what.op = ReduceOp::kExactSum;
  if (what.op != ReduceOp::kAverage) return what;
  const bool early = averages_early(round);
  if (round.is_contribution() ? !early : early) what.op = ReduceOp::kSum;
  return what;
}

void SumPlan::read_from(const Round& round) {
  sources.clear();
  log = nullptr;
  for (const Arrival& arrival : round.arrivals) {
    if (!arrival.has_payload() || arrival.is_compressed()) continue;
    transport::DirectAccess* direct = arrival.data->direct();
    std::byte* bytes = arrival.slot != nullptr ? arrival.slot->payload() : direct->map(arrival.span);
    sources.push_back({.bytes = bytes, .direct = direct, .span = arrival.span, .session = arrival.session});
    if (arrival.payload != Payload::kUnrounded) continue;
    sources.back().unrounded = true;
    if (arrival.slot != nullptr) sources.back().span.length = arrival.slot->capacity - transport::kMaxHeader;
  }
  if (!round.contributors->has_hosts() || !averages_early(round)) return;
  // Hosts have averaged their part. Ranks that are alone on theirs have not, nor has what came compressed.
  std::size_t source = 0;
  for (std::uint32_t i = 0; i < round.contributors->size(); ++i) {
    const Arrival& arrival = round.arrivals[i];
    const bool is_source = arrival.has_payload() && !arrival.is_compressed();
    if (!is_source) continue;
    const bool averaged = (*round.contributors)[i].is_host();
    SumMemory& one = sources[source++];
    if (round.compression == nullptr) {
      one.divide = !averaged;
    } else {
      one.averaged = averaged;
    }
  }
}

bool SumPlan::write_to(Round& round) {
  targets.clear();
  bool needs_slot = false;
  for (Arrival& arrival : round.arrivals) {
    if (!arrival.awaits_answer()) {
      needs_slot = true;
      continue;
    }
    if (!arrival.wants_data()) continue;
    transport::DirectAccess* direct = arrival.data->direct();
    if (direct == nullptr) {
      needs_slot = true;
      continue;
    }
    arrival.answer_bytes = AnswerBytes::kInPlace;
    SumMemory& target = targets.emplace_back();
    target.direct = direct;
    target.span = {arrival.answer_key, arrival.answer_address, round.first.length};
    target.session = arrival.session;
    target.bytes = direct->map(target.span);
  }
  return needs_slot;
}

}  // namespace bps::server
