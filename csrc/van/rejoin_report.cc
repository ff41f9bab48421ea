// SPDX-License-Identifier: Apache-2.0
#include "van/rejoin_report.h"

#include <algorithm>

namespace bps::van {

void RejoinReport::note_group(std::uint32_t group, const NewGroup& request) {
  const auto is_it = [&](const Rejoin::Made& made) { return made.group.id == group; };
  if (std::ranges::any_of(groups_, is_it)) return;
  groups_.push_back({{group, request.ranks}, request.name});
}

void RejoinReport::note_left(std::uint32_t node, const std::string& text) {
  left_.push_back(node);
  last_left_ = text;
}

Rejoin RejoinReport::make(std::uint32_t self, const Membership& membership,
                          const std::vector<Message>& requests) const {
  Rejoin known;
  known.run = run_;
  known.you = self;
  known.membership = membership;
  known.groups = groups_;
  known.left = left_;
  for (const auto& [group, ended] : barriers_) known.barriers.push_back({group, ended});
  for (const Message& request : requests) {
    if (const auto* barrier = std::get_if<Barrier>(&request)) known.waiting_barriers.push_back(*barrier);
    if (const auto* group = std::get_if<NewGroup>(&request)) known.waiting_groups.push_back(*group);
  }
  return known;
}

}  // namespace bps::van
