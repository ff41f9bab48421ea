// SPDX-License-Identifier: Apache-2.0
#include "van/reunion.h"

#include <algorithm>
#include <utility>

namespace bps::van {

std::optional<Refused> Reunion::add(Peer peer, const Rejoin& report) {
  if (report.run != run_) {
    return Refused{ErrorCode::kMismatch, "another run of the job has begun, in which this process has no place",
                   "end the processes of the earlier run; give each job its own BPS_JOB_ID"};
  }
  const std::uint32_t epoch = report.membership.epoch;
  const auto [known, is_new] = views_.try_emplace(epoch);
  if (is_new) known->second.membership = report.membership;
  if (known->second.membership != report.membership) {
    return Refused{ErrorCode::kInternal, "two processes tell of different views " + std::to_string(epoch),
                   "start the job again from its last checkpoint"};
  }
  known->second.left.insert(report.left.begin(), report.left.end());
  Rejoin calls = report;
  calls.membership = {};
  const std::uint64_t identity = report.self().identity;
  reports_[peer] = {epoch, identity, std::move(calls)};
  auto& last = last_of_[identity];
  last = std::max(last, {epoch, peer});
  return std::nullopt;
}

// Forgets a peer. Its report of the view stays if others report this view, as they say the same.
void Reunion::remove(Peer peer) {
  leaves_.erase(peer);
  const auto found = reports_.find(peer);
  if (found == reports_.end()) return;
  const auto [epoch, identity] = std::pair(found->second.epoch, found->second.identity);
  reports_.erase(found);
  last_of_.erase(identity);
  bool is_reported = false;
  for (const auto& [other, report] : reports_) {
    if (report.identity == identity) last_of_[identity] = std::max(last_of_[identity], {report.epoch, other});
    is_reported |= report.epoch == epoch;
  }
  if (!is_reported) views_.erase(epoch);
}

Peer Reunion::peer_of(std::uint64_t identity) const {
  const auto found = last_of_.find(identity);
  return found == last_of_.end() ? 0 : found->second.second;
}

bool Reunion::has_left(std::uint32_t node) const {
  return last().left.contains(node);
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
  std::unordered_set<std::uint64_t> in_view;
  for (const Node& node : view().nodes) in_view.insert(node.identity);
  std::vector<Peer> found;
  for (const auto& [peer, report] : reports_) {
    if (!in_view.contains(report.identity)) found.push_back(peer);
  }
  return found;
}

std::vector<std::pair<Peer, Message>> Reunion::owed() const {
  std::map<std::uint32_t, std::uint64_t> ended;  // by group: the number of barriers that have ended for some member
  std::map<std::pair<std::vector<std::uint32_t>, std::string>, std::uint32_t> made;
  for (const auto& [peer, report] : reports_) {
    if (!is_of_view(report)) continue;
    for (const auto& [group, count] : report.calls.barriers) ended[group] = std::max(ended[group], count);
    for (const auto& [group, name] : report.calls.groups) made[{group.ranks, name}] = group.id;
  }
  std::vector<std::pair<Peer, Message>> owed;
  for (const auto& [peer, report] : reports_) {
    if (!is_of_view(report)) continue;
    auto behind = ended;
    for (const auto& [group, count] : report.calls.barriers) behind[group] -= std::min(count, behind[group]);
    for (const Barrier& call : report.calls.waiting_barriers) {
      std::uint64_t& missing = behind[call.group];
      if (missing == 0) continue;
      --missing;
      owed.emplace_back(peer, Done{.call = call.call, .partition_bytes = 0, .group = call.group});
    }
    for (const NewGroup& call : report.calls.waiting_groups) {
      const auto found = made.find({call.ranks, call.name});
      if (found != made.end()) owed.emplace_back(peer, GroupReady{call.call, found->second});
    }
  }
  return owed;
}

}  // namespace bps::van
