// SPDX-License-Identifier: Apache-2.0
#include "van/rendezvous.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace bps::van {
namespace {

// A suspended job has at most this many members of each kind, so that there is memory for what one process says.
constexpr std::uint32_t kMostMembers = 1U << 20;
constexpr std::size_t kMostNamed = 4;  // how many lost processes one text names

std::string counts(std::uint32_t workers, std::uint32_t servers) {
  return std::to_string(workers) + (workers == 1 ? " worker and " : " workers and ") + std::to_string(servers) +
         (servers == 1 ? " server" : " servers");
}

}  // namespace

std::optional<Refused> refuse_terms(const Terms& terms, const Terms& others, const std::string& whose) {
  const auto found = difference(terms, others);
  if (!found) return std::nullopt;
  return Refused{ErrorCode::kMismatch, *found + whose, "set it alike for all members of the job"};
}

Refused refuse_identity() {
  return {ErrorCode::kMismatch, "a member of the job has the identity of this process", "start this process again"};
}

Rendezvous Rendezvous::of_suspended_job() {
  Rendezvous rendezvous(kMostMembers, kMostMembers);
  rendezvous.is_resumed_ = true;
  rendezvous.has_numbers_ = false;
  return rendezvous;
}

std::optional<Refused> Rendezvous::check_numbers(const Join& join) const {
  if (is_resumed_ && join.node.worker_rank == kNoRank) return std::nullopt;
  if (!has_numbers_) {
    if (join.workers > 0 && join.workers <= kMostMembers && join.servers > 0 && join.servers <= kMostMembers) return {};
    return Refused{ErrorCode::kInvalidArgument,
                   "this process expects " + counts(join.workers, join.servers) + ", which is no job",
                   "call resume() with the numbers of workers and servers from now on"};
  }
  if (join.workers == workers_ && join.servers == servers_) return std::nullopt;
  const std::string others = is_resumed_ ? "others that resume the job expect " : "the scheduler expects ";
  return Refused{
      ErrorCode::kMismatch,
      "this process expects " + counts(join.workers, join.servers) + ", " + others + counts(workers_, servers_),
      is_resumed_ ? "call resume() with the same numbers on every worker; new ones start with them"
                  : "set the same BPS_NUM_WORKERS and BPS_NUM_SERVERS (or WORLD_SIZE) on every node"};
}

std::optional<Refused> Rendezvous::check_terms(const Node& node) const {
  if (!is_resumed_) {
    if (auto refused = refuse_terms(node.terms, terms_, "the scheduler")) return refused;
  }
  // The others agree with each other: servers on what all must agree on, workers on more.
  const auto worker = std::ranges::find_if(joined_, &Terms::is_of_worker,
                                           [](const Joined& each) -> const Terms& { return each.node.terms; });
  for (const auto other : {joined_.begin(), worker}) {
    if (other == joined_.end()) continue;
    if (auto refused = refuse_terms(node.terms, other->node.terms, other->node.describe())) return refused;
  }
  return std::nullopt;
}

std::optional<Refused> Rendezvous::add(Peer peer, const Join& join) {
  if (auto refused = check_numbers(join)) return refused;
  if (!may_belong_together(origin_, join.origin)) {
    return Refused{ErrorCode::kMismatch,
                   "this process was started as `" + command_of(join.origin) + "`, but the process with rank 0 as `" +
                       command_of(origin_) + "`: two jobs have the same MASTER_ADDR and MASTER_PORT",
                   "give each job a MASTER_PORT of its own; if both are of one job, set BPS_JOB_ID to the same name on "
                   "all ranks"};
  }
  if (join.node.worker_rank == kNoRank && join.node.server_rank == kNoRank) {
    return Refused{ErrorCode::kInvalidArgument, "this process is neither worker nor server",
                   "set BPS_ROLE to worker or server"};
  }
  if (!join.node.has_loops()) {
    return Refused{ErrorCode::kInvalidArgument, "this process has no loop to work on",
                   "install the same bps_rdma version everywhere"};
  }
  if (!has_numbers_ && join.node.worker_rank != kNoRank) {
    workers_ = join.workers;
    servers_ = join.servers;
    has_numbers_ = true;
  }
  auto refused = check_terms(join.node);
  if (!refused) refused = check_rank(join.node, &Node::worker_rank, workers_, "worker");
  if (!refused) refused = check_rank(join.node, &Node::server_rank, servers_, "server");
  const bool is_known = join.node.identity != 0 && identities_.contains(join.node.identity);
  if (!refused && is_known) refused = refuse_identity();
  if (refused) return forget_unused_numbers(), refused;
  push(peer, join.node);
  return std::nullopt;
}

void Rendezvous::push(Peer peer, Node node) {
  workers_taken_.add(node.worker_rank);
  servers_taken_.add(node.server_rank);
  identities_.insert(node.identity);
  forget_lost(node);
  joined_.push_back({peer, std::move(node)});
}

void Rendezvous::count() {
  workers_taken_ = servers_taken_ = {};
  identities_.clear();
  for (const Joined& joined : joined_) {
    identities_.insert(joined.node.identity);
    workers_taken_.add(joined.node.worker_rank);
    servers_taken_.add(joined.node.server_rank);
  }
}

void Rendezvous::add_again(Peer peer, Node node) {
  // A new server may have asked for this rank meanwhile.
  if (is_resumed_ && servers_taken_.ranks.contains(node.server_rank)) node.server_rank = kAnyRank;
  push(peer, std::move(node));
}

std::optional<Refused> Rendezvous::check_rank(const Node& node, Rank rank, std::uint32_t count,
                                              const std::string& role) const {
  const std::int32_t wanted = node.*rank;
  if (wanted == kNoRank) return std::nullopt;
  if (wanted >= 0 && static_cast<std::uint32_t>(wanted) >= count) {
    return Refused{
        ErrorCode::kMismatch,
        role + " rank " + std::to_string(wanted) + " is out of range: the job has " + counts(workers_, servers_),
        "ranks count from 0; check RANK and BPS_WORKER_ID against the number of processes"};
  }
  if (taken(rank).ranks.contains(wanted)) {
    const auto holder = std::ranges::find_if(joined_, [&](const Joined& other) { return other.node.*rank == wanted; });
    return Refused{ErrorCode::kMismatch,
                   role + " rank " + std::to_string(wanted) + " is taken by the process with pid " +
                       std::to_string(holder->node.pid) + " on " + holder->node.host,
                   "give every process its own rank (RANK, BPS_WORKER_ID), and each job its own BPS_JOB_ID"};
  }
  if (number_of(rank) >= count) {
    return Refused{ErrorCode::kMismatch, "all " + counts(workers_, servers_) + " have joined already",
                   "start as many processes as BPS_NUM_WORKERS and BPS_NUM_SERVERS say"};
  }
  return std::nullopt;
}

void Rendezvous::remove(Peer peer) {
  if (std::erase_if(joined_, [peer](const Joined& joined) { return joined.peer == peer; }) == 0) return;
  count();
  forget_unused_numbers();
}

std::string Rendezvous::lose(Peer peer, const std::string& why) {
  const auto joined = std::ranges::find(joined_, peer, &Joined::peer);
  if (joined == joined_.end()) return "";
  const Node& node = joined->node;
  const std::string name = node.describe();
  forget_lost(node);
  if (lost_.size() < kMostNamed) {
    lost_.push_back({node.worker_rank, node.server_rank, name + " had joined and was lost: " + why});
  } else {
    ++lost_unnamed_;
  }
  remove(peer);
  return name;
}

// Forgets the numbers of members. The next process that comes tells them.
void Rendezvous::forget_unused_numbers() {
  if (!is_resumed_ || has_workers()) return;
  workers_ = servers_ = kMostMembers;
  has_numbers_ = false;
}

bool Rendezvous::complete() const {
  return has_numbers_ && number_of(&Node::worker_rank) == workers_ && number_of(&Node::server_rank) >= servers_;
}

std::string Rendezvous::missing() const {
  if (!has_numbers_) return "no worker has resumed the job";
  std::string text = missing(&Node::worker_rank, workers_, "worker");
  const std::string servers = missing(&Node::server_rank, servers_, "server");
  if (!text.empty() && !servers.empty()) text += "; ";
  return text + servers + lost();
}

std::string Rendezvous::lost() const {
  std::string text;
  for (const Lost& one : lost_) text += "; " + one.how;
  if (lost_unnamed_ > 0) text += "; " + std::to_string(lost_unnamed_) + " more were lost as well";
  return text;
}

// Forgets lost processes that this one replaces. One without a rank of its own replaces nobody for certain.
void Rendezvous::forget_lost(const Node& node) {
  if (node.worker_rank < 0 && node.server_rank < 0) return;
  std::erase_if(lost_, [&](const Lost& one) {
    return one.worker_rank == node.worker_rank && one.server_rank == node.server_rank;
  });
}

std::string Rendezvous::missing(Rank rank, std::uint32_t count, const std::string& role) const {
  const std::uint32_t here = number_of(rank);
  if (here >= count) return "";
  std::string text =
      std::to_string(here) + " of " + std::to_string(count) + " " + role + (count == 1 ? "" : "s") + " joined";
  std::vector<bool> taken(count);
  for (const Joined& joined : joined_) {
    if (joined.node.*rank == kAnyRank) return text;  // any of the free ranks may be its own
    const auto place = static_cast<std::size_t>(joined.node.*rank);
    if (joined.node.*rank >= 0 && place < count) taken[place] = true;  // others get a free one, see seat()
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
  push(peer, std::move(node));
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

// Leaves out the last ones. Servers that stay, and whose rank does not exist any more, get a free one.
void Rendezvous::leave_out_spare_servers() {
  const auto place = [](const Joined& joined) {
    return joined.node.worker_rank == kNoRank ? joined.node.server_rank : kNoRank;
  };
  for (std::uint32_t left = number_of(&Node::server_rank); left > servers_; --left) {
    joined_.erase(std::ranges::max_element(joined_, {}, place));
  }
  for (Joined& joined : joined_) {
    if (joined.node.server_rank >= static_cast<std::int32_t>(servers_)) joined.node.server_rank = kAnyRank;
  }
}

Rendezvous::Seating Rendezvous::seat() {
  if (is_resumed_) leave_out_spare_servers();
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
  count();
  return seating;
}

}  // namespace bps::van
