// SPDX-License-Identifier: Apache-2.0
// Keeps the members of a running job, and what has become of each.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "van/rendezvous.h"

namespace bps::van {

struct Member {
  enum class Fate : std::uint8_t { kHere, kLeft, kLost };

  Peer peer = 0;
  const Node* node = nullptr;
  Fate fate = Fate::kHere;
  std::uint32_t went = 0;  // its place among those that have left or were lost, from 1; 0: it is here
  bool connected = true;
  bool suspends = false;  // it has left to come back
  Peer renewed_as = 0;    // its connection in the view to come, once it has joined that
  Peer before = 0;        // its connection in the view before, until it has closed that
  std::string farewell;   // "worker 1 (host, pid 42) has left the job"; empty: it is here
  std::string cause;      // the first loss that led to its end, if one did: its own or that of another member

  bool is_worker() const { return node->worker_rank >= 0; }
  bool is_here() const { return fate == Fate::kHere; }
  // Returns true when the member has left as it should. Its server, if it has one, stays until all have left.
  bool serves_on() const { return fate == Fate::kLeft && cause.empty() && connected; }
  // Returns true when a peer that suspects the member can be told that it is reachable. A peer whose connection to it
  // is broken cannot reach a member that has left.
  bool can_answer(bool is_broken) const { return is_here() || (serves_on() && !is_broken); }
  bool is_awaited() const { return is_here() && renewed_as == 0; }  // by the next view
  std::string name() const { return is_worker() ? "rank " + std::to_string(rank()) : node->describe(); }
  std::uint32_t rank() const { return static_cast<std::uint32_t>(node->worker_rank); }  // of a worker
};

class MemberTable {
 public:
  MemberTable() = default;
  explicit MemberTable(Rendezvous::Seating seating) : membership_(std::move(seating.membership)) {
    members_.reserve(membership_.nodes.size());
    for (std::size_t i = 0; i < membership_.nodes.size(); ++i) {
      members_.push_back({.peer = seating.peers[i], .node = &membership_.nodes[i], .farewell = "", .cause = ""});
      by_identity_.emplace(membership_.nodes[i].identity, i);
      if (seating.peers[i] != 0) by_peer_.emplace(seating.peers[i], i);
    }
  }
  MemberTable(const MemberTable&) = delete;
  MemberTable& operator=(const MemberTable&) = delete;

  const Membership& membership() const { return membership_; }
  // Returns true when the members that are here can be a view.
  bool can_go_on(std::uint32_t min_workers) const {
    std::uint32_t workers = 0;
    bool any_server = false;
    for (const Member& member : members_) {
      if (!member.is_here()) continue;
      workers += member.is_worker() ? 1 : 0;
      any_server |= member.node->server_rank >= 0;
    }
    return workers >= min_workers && any_server;
  }
  // Returns true when no worker is here any more.
  bool have_all_left() const {
    return std::ranges::none_of(members_, [](const Member& one) { return one.is_worker() && one.is_here(); });
  }
  // Returns true when one of those that have left is going to come back.
  bool has_suspended() const { return std::ranges::any_of(members_, &Member::suspends); }
  // Notes that the member has left or is lost.
  void note_gone(Member& member, Member::Fate fate) {
    member.fate = fate;
    if (member.went == 0) member.went = ++gone_;
  }
  std::vector<Member>& all() { return members_; }
  // Returns the connections of the members for whom `holds` is true. It may be a function such as &Member::is_here.
  std::vector<Peer> peers(auto holds) const {
    std::vector<Peer> found;
    for (const Member& member : members_) {
      if (std::invoke(holds, member)) found.push_back(member.peer);
    }
    return found;
  }
  Member& worker(std::uint32_t rank) { return members_[rank]; }  // workers come first
  Member* by_node(std::uint32_t id) { return id == 0 || id > members_.size() ? nullptr : &members_[id - 1]; }
  Member* by_identity(std::uint64_t identity) { return find_in(by_identity_, identity); }
  Member* find(Peer peer) {
    Member* const member = find_in(by_peer_, peer);
    return member != nullptr && member->peer == peer ? member : nullptr;
  }
  // Returns the member whose connection this was in the view before, or null.
  Member* find_before(Peer peer) {
    Member* const member = find_in(by_peer_, peer);
    return member != nullptr && member->before == peer ? member : nullptr;
  }
  // Returns the member that has joined the view to come by this connection, or null.
  Member* find_renewed(Peer peer) {
    Member* const member = find_in(by_peer_, peer);
    return member != nullptr && member->renewed_as == peer ? member : nullptr;
  }
  void set_before(Member& member, Peer peer) { set(member, member.before, peer); }
  void renew(Member& member, Peer peer) { set(member, member.renewed_as, peer); }

 private:
  template <typename Key>
  Member* find_in(const std::unordered_map<Key, std::size_t>& places, Key key) {
    const auto found = places.find(key);
    return found == places.end() ? nullptr : &members_[found->second];
  }
  void set(Member& member, Peer& connection, Peer peer) {
    by_peer_.erase(connection);
    connection = peer;
    if (peer != 0) by_peer_.emplace(peer, static_cast<std::size_t>(&member - members_.data()));
  }

  const Membership membership_{};
  std::vector<Member> members_;
  std::unordered_map<Peer, std::size_t> by_peer_;  // each connection of a member, in this view, before and after it
  std::unordered_map<std::uint64_t, std::size_t> by_identity_;
  std::uint32_t gone_ = 0;
};

}  // namespace bps::van
