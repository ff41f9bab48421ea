// SPDX-License-Identifier: Apache-2.0
#include "van/rendezvous.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace bps::van {
namespace {

std::string counts(std::uint32_t workers, std::uint32_t servers) {
  return std::to_string(workers) + (workers == 1 ? " worker and " : " workers and ") + std::to_string(servers) +
         (servers == 1 ? " server" : " servers");
}

}  // namespace

std::optional<Refused> Rendezvous::add(Peer peer, const Join& join) {
  if (join.workers != workers_ || join.servers != servers_) {
    return Refused{ErrorCode::kMismatch,
                   "this process expects " + counts(join.workers, join.servers) + ", the scheduler expects " +
                       counts(workers_, servers_),
                   "set the same DMLC_NUM_WORKER and DMLC_NUM_SERVER (or WORLD_SIZE) on every node"};
  }
  if (join.node.worker_rank == kNoRank && join.node.server_rank == kNoRank) {
    return Refused{ErrorCode::kInvalidArgument, "this process is neither worker nor server",
                   "set DMLC_ROLE to worker or server"};
  }
  if (!join.node.has_loops()) {
    return Refused{ErrorCode::kInvalidArgument, "this process has no loop to work on",
                   "install the same bps_rdma version everywhere"};
  }
  if (auto refused = check_rank(join.node, &Node::worker_rank, workers_, "worker")) return refused;
  if (auto refused = check_rank(join.node, &Node::server_rank, servers_, "server")) return refused;
  joined_.push_back({peer, join.node});
  return std::nullopt;
}

std::optional<Refused> Rendezvous::check_rank(const Node& node, Rank rank, std::uint32_t count,
                                              const std::string& role) const {
  const std::int32_t wanted = node.*rank;
  if (wanted == kNoRank) return std::nullopt;
  if (wanted >= 0 && static_cast<std::uint32_t>(wanted) >= count) {
    return Refused{
        ErrorCode::kMismatch,
        role + " rank " + std::to_string(wanted) + " is out of range: the job has " + counts(workers_, servers_),
        "ranks count from 0; check RANK and DMLC_WORKER_ID against the number of processes"};
  }
  const auto holder = std::ranges::find_if(joined_, [&](const Joined& other) { return other.node.*rank == wanted; });
  if (wanted >= 0 && holder != joined_.end()) {
    return Refused{ErrorCode::kMismatch,
                   role + " rank " + std::to_string(wanted) + " is taken by the process with pid " +
                       std::to_string(holder->node.pid) + " on " + holder->node.host,
                   "give every process its own rank (RANK, DMLC_WORKER_ID), and each job its own BPS_JOB_ID"};
  }
  if (number_of(rank) >= count) {
    return Refused{ErrorCode::kMismatch, "all " + counts(workers_, servers_) + " have joined already",
                   "start as many processes as DMLC_NUM_WORKER and DMLC_NUM_SERVER say"};
  }
  return std::nullopt;
}

void Rendezvous::remove(Peer peer) {
  std::erase_if(joined_, [peer](const Joined& joined) { return joined.peer == peer; });
}

std::uint32_t Rendezvous::number_of(Rank rank) const {
  return static_cast<std::uint32_t>(
      std::ranges::count_if(joined_, [rank](const Joined& joined) { return joined.node.*rank != kNoRank; }));
}

bool Rendezvous::complete() const {
  return number_of(&Node::worker_rank) == workers_ && number_of(&Node::server_rank) == servers_;
}

std::string Rendezvous::missing() const {
  std::string text = missing(&Node::worker_rank, workers_, "worker");
  const std::string servers = missing(&Node::server_rank, servers_, "server");
  if (!text.empty() && !servers.empty()) text += "; ";
  return text + servers;
}

std::string Rendezvous::missing(Rank rank, std::uint32_t count, const std::string& role) const {
  const std::uint32_t here = number_of(rank);
  if (here >= count) return "";
  std::string text =
      std::to_string(here) + " of " + std::to_string(count) + " " + role + (count == 1 ? "" : "s") + " joined";
  std::vector<bool> taken(count);
  for (const Joined& joined : joined_) {
    if (joined.node.*rank == kAnyRank) return text;  // any of the free ranks may be its
    if (joined.node.*rank >= 0) taken[static_cast<std::size_t>(joined.node.*rank)] = true;
  }
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!taken[i]) ranks.push_back(i);
  }
  return text + (role == "server" ? "; missing server " : "; missing ") + name_ranks(ranks);
}

void Rendezvous::assign(Rank rank, std::uint32_t count, std::vector<Joined*> order) {
  std::vector<bool> taken(count);
  for (const Joined* joined : order) {
    if (joined->node.*rank >= 0) taken[static_cast<std::size_t>(joined->node.*rank)] = true;
  }
  std::size_t next = 0;
  for (Joined* joined : order) {
    if (joined->node.*rank != kAnyRank) continue;
    while (taken[next]) ++next;
    joined->node.*rank = static_cast<std::int32_t>(next++);
  }
}

void Rendezvous::add_new(Peer peer, Node node) {
  for (const Rank rank : {&Node::worker_rank, &Node::server_rank}) {
    if (node.*rank != kNoRank) node.*rank = kAnyRank;
  }
  joined_.push_back({peer, std::move(node)});
}

std::uint32_t Rendezvous::close_up(Rank rank) {
  const auto place = [rank](const Joined& joined) {
    const std::int32_t wanted = joined.node.*rank;
    return wanted == kAnyRank ? std::numeric_limits<std::int32_t>::max() : wanted;
  };
  std::ranges::stable_sort(joined_, {}, place);
  std::int32_t next = 0;
  for (Joined& joined : joined_) {
    if (joined.node.*rank != kNoRank) joined.node.*rank = next++;
  }
  return static_cast<std::uint32_t>(next);
}

Rendezvous::Seating Rendezvous::seat_again() {
  servers_ = close_up(&Node::server_rank);
  workers_ = close_up(&Node::worker_rank);
  return seat();
}

Rendezvous::Seating Rendezvous::seat() {
  std::vector<Joined*> order;
  for (Joined& joined : joined_) order.push_back(&joined);
  assign(&Node::worker_rank, workers_, order);
  std::ranges::stable_sort(order, {}, [](const Joined* joined) { return joined->node.worker_rank; });  // kNoRank first
  assign(&Node::server_rank, servers_, order);
  std::ranges::sort(order, {}, [](const Joined* joined) {
    const Node& node = joined->node;
    return std::tuple(node.worker_rank == kNoRank, node.worker_rank, node.server_rank);
  });

  Seating seating{{.nodes = {}, .workers = workers_, .servers = servers_}, {}};
  for (Joined* joined : order) {
    joined->node.id = static_cast<std::uint32_t>(seating.peers.size() + 1);
    seating.membership.nodes.push_back(std::move(joined->node));
    seating.peers.push_back(joined->peer);
  }
  joined_.clear();
  return seating;
}

}  // namespace bps::van
