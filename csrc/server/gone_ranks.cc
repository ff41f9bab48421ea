// SPDX-License-Identifier: Apache-2.0
#include "server/gone_ranks.h"

#include <algorithm>

namespace bps::server {

// A member that has left as it should may have contributed before by a push on its own. If it is a rank of another host
// only its relay knows that, and is asked once all have left (why_host_left). It has waited for any other operation, to
// which all hosts must have contributed by then, or given it up.
bool GoneRanks::cannot_contribute(const RoundGroup& group, std::uint32_t rank, Departure state, const RoundKey& key,
                                  const Round* round, tensor::OperationKind kind) const {
  const std::int32_t position = group.group.index_of(rank);
  const van::Contributors& contributors = group.contributors(key.for_host);
  if (state == Departure::kLost) {
    if (position != van::kNoRank) return true;
    if (key.for_host || !contributors.has_hosts()) return false;
    return groups_.contributor_of(group, rank, false) != van::Contributors::kNone;  // may be the relay of members
  }
  if (state == Departure::kClosed && lacks_speaker(group, rank, key, round)) return true;
  const std::uint32_t index = position == van::kNoRank ? van::Contributors::kNone
                                                       : contributors.of_position(static_cast<std::uint32_t>(position));
  if (index == van::Contributors::kNone && position != van::kNoRank && kind < tensor::OperationKind::kSplit) {
    return round == nullptr || !round->is_with_servers();
  }
  if (index == van::Contributors::kNone || (round != nullptr && round->arrivals[index].has_pushed())) return false;
  return kind < tensor::OperationKind::kSplit || !contributors[index].is_host();
}

// Returns true when a contribution must still come from this rank, in its own name or that of its host, and the rank
// cannot be reached any more. Also returns true when it has come, and its bytes are where they cannot be read.
bool GoneRanks::lacks_speaker(const RoundGroup& group, std::uint32_t rank, const RoundKey& key,
                              const Round* round) const {
  const std::uint32_t index = groups_.contributor_of(group, rank, key.for_host);
  if (index == van::Contributors::kNone || groups_.speaker_of(group, key, index) != rank) return false;
  if (round == nullptr || !round->arrivals[index].has_pushed())
    return group.contributors(key.for_host)[index].is_host();
  return !round->is_summed() && round->arrivals[index].has_payload() && round->arrivals[index].slot == nullptr;
}

const std::string* GoneRanks::why_incomplete(const RoundGroup& group, const RoundKey& key, const Round* round,
                                             tensor::OperationKind kind) const {
  for (const auto& [rank, gone] : ranks_) {
    if (cannot_contribute(group, rank, gone.state, key, round, kind)) return &gone.why;
  }
  return nullptr;
}

const std::string* GoneRanks::why_ended(const RoundGroup& group) const {
  const auto gone =
      std::ranges::find_if(ranks_, [&](const auto& one) { return group.group.index_of(one.first) != van::kNoRank; });
  return gone == ranks_.end() ? nullptr : &gone->second.why;
}

const std::string* GoneRanks::why_host_left(const RoundGroup& group, std::uint32_t contributor) const {
  const van::Contributor& host = group.network[contributor];
  const auto has_left = [&](std::uint32_t position) { return contains(group.group.ranks[position]); };
  if (!host.is_host() || !std::ranges::all_of(host.positions, has_left)) return nullptr;
  return &ranks_.at(group.group.ranks[host.positions.front()]).why;
}

// A relay that leaves as it should has waited for those for which it speaks.
const std::string* GoneRanks::why_unreachable(const Round& round, std::uint32_t contributor) const {
  const auto gone = ranks_.find(groups_.speaker_of(round, contributor));
  if (gone == ranks_.end()) return nullptr;
  const bool may_be_told = gone->second.state == Departure::kLeft && (*round.contributors)[contributor].is_host();
  return may_be_told ? nullptr : &gone->second.why;
}

}  // namespace bps::server
