// SPDX-License-Identifier: Apache-2.0
// Gathers the processes that have asked to join, and decides which ranks they get. It is a pure state machine of the
// scheduler: no sockets, no clock.
//
// A requested rank is granted; a process without a request gets a free one in the order of arrival. Servers that are no
// workers get the lower free server ranks (what the key hash `mixed` expects), then joint ones in the order of their
// worker ranks: in a job of joint processes both ranks are equal.
//
// In a job that was suspended the workers that join say how many members there are. Servers know only the numbers of
// the time when they were started. Those that live on keep their ranks, and servers that the workers do not ask for are
// left out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "van/messages.h"

namespace bps::van {

// Numbers a connection of the scheduler. No number is used twice.
using Peer = std::uint64_t;

// Returns the reply to a process that has the identity of another one. Each finds itself in the membership by its
// identity, so no two may have the same.
Refused refuse_identity();
// Returns why a process with these terms cannot be in a job with those of `whose`, or nothing.
std::optional<Refused> refuse_terms(const Terms& terms, const Terms& others, const std::string& whose);

class Rendezvous {
 public:
  // `origin` and `terms` are those of the rank that hosts the scheduler, or of the scheduler. The others have to fit
  // them.
  Rendezvous(std::uint32_t workers, std::uint32_t servers, Terms terms = {}, Origin origin = {})
      : workers_(workers), servers_(servers), terms_(std::move(terms)), origin_(std::move(origin)) {}
  static Rendezvous of_suspended_job();

  // Returns why this process cannot join, or nothing.
  std::optional<Refused> add(Peer peer, const Join& join);
  // Adds a member of the view that has ended, with the ranks that it had there.
  void add_again(Peer peer, Node node);
  // Adds a process that enters a job which is running. It gets the ranks after those of the others.
  void add_new(Peer peer, Node node);
  void remove(Peer peer);
  // Removes a process whose connection has ended, and remembers it until another one comes in its place. Returns its
  // name, "worker 1 (host, pid 7)", or "" for a peer that has not joined.
  std::string lose(Peer peer, const std::string& why);
  bool empty() const { return joined_.empty(); }
  bool has_workers() const { return number_of(&Node::worker_rank) > 0; }
  bool complete() const;
  // Tells people who is missing: "2 of 4 workers joined; missing ranks 1, 3; worker 1 (host, pid 7) had joined and was
  // lost: connection closed".
  std::string missing() const;

  struct Seating {
    Membership membership;
    std::vector<Peer> peers;  // peers[i] is membership.nodes[i]
  };
  // Seats those who have joined. To be called once, when complete.
  Seating seat();
  // Seats those who have joined again, however many they are. The ranks keep their order and close up.
  Seating seat_again();

 private:
  struct Joined {
    Peer peer;
    Node node;
  };
  using Rank = std::int32_t Node::*;
  // Keeps the ranks that those who have joined want. Thousands may come, and each is checked against all others.
  struct Taken {
    std::uint32_t members = 0;  // how many want a rank of this kind
    std::unordered_set<std::int32_t> ranks;

    void add(std::int32_t rank) {
      if (rank == kNoRank) return;
      ++members;
      if (rank >= 0) ranks.insert(rank);
    }
  };
  Taken& taken(Rank rank) { return rank == &Node::worker_rank ? workers_taken_ : servers_taken_; }
  const Taken& taken(Rank rank) const { return rank == &Node::worker_rank ? workers_taken_ : servers_taken_; }

  std::optional<Refused> check_numbers(const Join& join) const;
  std::optional<Refused> check_terms(const Node& node) const;
  std::optional<Refused> check_rank(const Node& node, Rank rank, std::uint32_t count, const std::string& role) const;
  std::uint32_t number_of(Rank rank) const { return taken(rank).members; }
  std::string missing(Rank rank, std::uint32_t count, const std::string& role) const;
  std::string lost() const;
  void forget_lost(const Node& node);
  std::uint32_t close_up(Rank rank);
  void leave_out_spare_servers();
  void forget_unused_numbers();
  void push(Peer peer, Node node);
  void count();
  void assign(Rank rank, std::uint32_t count, std::vector<Joined*> order);

  std::uint32_t workers_;
  std::uint32_t servers_;
  Terms terms_{};
  Origin origin_{};
  bool is_resumed_ = false;     // the job was suspended
  bool has_numbers_ = true;     // workers_ and servers_ are known
  std::vector<Joined> joined_;  // in the order of arrival
  // Describes a process that is gone again, and that no process with the same wishes has replaced. Only the first few
  // are named.
  struct Lost {
    std::int32_t worker_rank;
    std::int32_t server_rank;
    std::string how;
  };
  std::vector<Lost> lost_;
  std::size_t lost_unnamed_ = 0;
  Taken workers_taken_, servers_taken_;
  std::unordered_set<std::uint64_t> identities_;
};

}  // namespace bps::van
