// SPDX-License-Identifier: Apache-2.0
#include "server/round_groups.h"

#include "tensor/key_map.h"

namespace bps::server {

const RoundGroup* RoundGroups::add_alone(std::uint32_t rank) {
  const std::uint32_t id = tensor::kAlone | rank;
  const auto [entry, fresh] = groups_.emplace(id, std::make_unique<RoundGroup>(van::Group{id, {rank}}, hosts_, here_));
  return latest_ = entry->second.get();
}

std::uint32_t RoundGroups::contributor_of(const RoundGroup& group, std::uint32_t rank, bool for_host) const {
  const std::int32_t position = group.group.index_of(rank);
  const van::Contributors& contributors = group.contributors(for_host);
  if (position != van::kNoRank) return contributors.of_position(static_cast<std::uint32_t>(position));
  if (for_host || !contributors.has_hosts()) return van::Contributors::kNone;
  for (std::uint32_t i = 0; i < contributors.size(); ++i) {
    if (contributors[i].is_host() && contributors[i].host == hosts_.host_of(rank)) return i;
  }
  return van::Contributors::kNone;
}

std::uint32_t RoundGroups::speaker_of(const RoundGroup& group, const RoundKey& key, std::uint32_t index) const {
  const van::Contributor& contributor = group.contributors(key.for_host)[index];
  if (!contributor.is_host()) return group.group.ranks[contributor.positions.front()];
  return hosts_.relay(contributor.host, here_.server_rank,
                      tensor::relay_hash(tensor::spread_of(key.tensor, key.partition)));
}

}  // namespace bps::server
