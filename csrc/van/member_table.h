// SPDX-License-Identifier: Apache-2.0
// The members of a running job, and what has become of each.
#pragma once

#include <string>
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
  std::string farewell;   // "worker 1 (host, pid 42) has left the job", once it is not here
  std::string cause;      // the first loss that led to its end, if one did: its own or that of another member

  bool is_worker() const { return node->worker_rank >= 0; }
  bool is_awaited() const { return fate == Fate::kHere && renewed_as == 0; }  // in the next view
  std::string name() const { return is_worker() ? "rank " + std::to_string(rank()) : node->describe(); }
  std::uint32_t rank() const { return static_cast<std::uint32_t>(node->worker_rank); }  // of a worker
};

class MemberTable {
 public:
  explicit MemberTable(Rendezvous::Seating seating) : membership_(std::move(seating.membership)) {
    for (std::size_t i = 0; i < membership_.nodes.size(); ++i) {
      members_.push_back({.peer = seating.peers[i], .node = &membership_.nodes[i], .farewell = "", .cause = ""});
    }
  }
  MemberTable(const MemberTable&) = delete;
  MemberTable& operator=(const MemberTable&) = delete;

  const Membership& membership() const { return membership_; }
  // It has left, or is lost.
  void note_gone(Member& member, Member::Fate fate) {
    member.fate = fate;
    if (member.went == 0) member.went = ++gone_;
  }
  std::vector<Member>& members() { return members_; }
  Member& worker(std::uint32_t rank) { return members_[rank]; }  // workers come first
  Member* by_node(std::uint32_t id) { return id == 0 || id > members_.size() ? nullptr : &members_[id - 1]; }
  Member* by_identity(std::uint64_t identity) {
    for (Member& member : members_) {
      if (member.node->identity == identity) return &member;
    }
    return nullptr;
  }
  Member* find(Peer peer) {
    for (Member& member : members_) {
      if (member.peer == peer) return &member;
    }
    return nullptr;
  }
  // The member whose connection this was in the view before.
  Member* find_before(Peer peer) {
    for (Member& member : members_) {
      if (member.before == peer) return &member;
    }
    return nullptr;
  }
  // The member that has joined the view to come by this connection.
  Member* find_renewed(Peer peer) {
    for (Member& member : members_) {
      if (member.renewed_as == peer) return &member;
    }
    return nullptr;
  }

 private:
  const Membership membership_;
  std::vector<Member> members_;
  std::uint32_t gone_ = 0;
};

}  // namespace bps::van
