// SPDX-License-Identifier: Apache-2.0
#include "van/reunion.h"

#include <algorithm>
#include <map>

namespace bps::van {

std::optional<Refused> Reunion::add(Peer peer, const Rejoin& report) {
  if (report.run != run_) {
    return Refused{ErrorCode::kMismatch, "another run of the job has begun, in which this process has no place",
                   "end the processes of the earlier run; give each job its own BPS_JOB_ID"};
  }
  for (const auto& [other, known] : reports_) {
    if (known.membership.epoch == report.membership.epoch && known.membership != report.membership) {
      return Refused{ErrorCode::kInternal,
                     "two processes tell of different views " + std::to_string(report.membership.epoch),
                     "start the job again from its last checkpoint"};
    }
  }
  reports_[peer] = report;
  return std::nullopt;
}

void Reunion::remove(Peer peer) {
  reports_.erase(peer);
  leaves_.erase(peer);
}

const Membership& Reunion::view() const {
  const auto epoch = [](const auto& one) { return one.second.membership.epoch; };
  return std::ranges::max_element(reports_, {}, epoch)->second.membership;
}

Peer Reunion::peer_of(std::uint64_t identity) const {
  std::pair<std::uint32_t, Peer> last{0, 0};
  for (const auto& [peer, report] : reports_) {
    if (report.self().identity == identity) last = std::max(last, {report.membership.epoch, peer});
  }
  return last.second;
}

bool Reunion::has_left(std::uint32_t node) const {
  return std::ranges::any_of(reports_, [&](const auto& one) {
    return is_of_view(one.second) && std::ranges::count(one.second.left, node) > 0;
  });
}

bool Reunion::complete() const {
  if (empty()) return false;
  return std::ranges::all_of(view().nodes,
                             [&](const Node& node) { return peer_of(node.identity) != 0 || has_left(node.id); });
}

std::string Reunion::progress() const {
  if (empty()) return "";
  const auto came = std::ranges::count_if(view().nodes, [&](const Node& node) { return peer_of(node.identity) != 0; });
  return std::to_string(came) + " of " + std::to_string(view().nodes.size()) + " processes came back";
}

Rendezvous::Seating Reunion::seating() const {
  Rendezvous::Seating seating{view(), {}};
  for (const Node& node : seating.membership.nodes) seating.peers.push_back(peer_of(node.identity));
  return seating;
}

std::vector<Peer> Reunion::strangers() const {
  const auto is_in_view = [&](std::uint64_t identity) {
    return std::ranges::any_of(view().nodes, [&](const Node& node) { return node.identity == identity; });
  };
  std::vector<Peer> found;
  for (const auto& [peer, report] : reports_) {
    if (!is_in_view(report.self().identity)) found.push_back(peer);
  }
  return found;
}

std::vector<std::pair<Peer, Message>> Reunion::owed() const {
  std::map<std::uint32_t, std::uint64_t> ended;  // by group: the barriers that have ended for some member
  std::map<std::pair<std::vector<std::uint32_t>, std::string>, std::uint32_t> made;
  for (const auto& [peer, report] : reports_) {
    if (!is_of_view(report)) continue;
    for (const auto& [group, count] : report.barriers) ended[group] = std::max(ended[group], count);
    for (const auto& [group, name] : report.groups) made[{group.ranks, name}] = group.id;
  }
  std::vector<std::pair<Peer, Message>> owed;
  for (const auto& [peer, report] : reports_) {
    if (!is_of_view(report)) continue;
    auto behind = ended;
    for (const auto& [group, count] : report.barriers) behind[group] -= std::min(count, behind[group]);
    for (const Barrier& call : report.waiting_barriers) {
      std::uint64_t& missing = behind[call.group];
      if (missing == 0) continue;
      --missing;
      owed.emplace_back(peer, Done{.call = call.call, .partition_bytes = 0, .group = call.group});
    }
    for (const NewGroup& call : report.waiting_groups) {
      const auto found = made.find({call.ranks, call.name});
      if (found != made.end()) owed.emplace_back(peer, GroupReady{call.call, found->second});
    }
  }
  return owed;
}

}  // namespace bps::van
