// SPDX-License-Identifier: Apache-2.0
// Gathers the members of a job whose scheduler was lost, as they come to the scheduler that was started in its place.
// It is a pure state machine of that scheduler: no sockets, no clock.
//
// Only its members know the job, and each one reports the view that it is in. Of two views that are reported the later
// one counts, because some member has been welcomed to it. Members of the earlier view that are not in the later one
// had been lost already.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "van/rendezvous.h"

namespace bps::van {

class Reunion {
 public:
  explicit Reunion(std::uint64_t run) : run_(run) {}

  // Returns why this process cannot come back, or nothing.
  std::optional<Refused> add(Peer peer, const Rejoin& report);
  // Notes that a process which has come back leaves.
  void add_leave(Peer peer, const Leave& leave) { leaves_[peer] = leave; }
  void remove(Peer peer);
  bool knows(Peer peer) const { return reports_.contains(peer); }
  bool empty() const { return reports_.empty(); }
  // Returns true when every process of the view has come back or had left.
  bool complete() const;
  // Tells people how many have come: "2 of 3 processes came back".
  std::string progress() const;

  // Returns the seating of the view that counts; peers[i] is 0 for a node that has not come back. Not to be called
  // while empty().
  Rendezvous::Seating seating() const;
  // Returns true when this node had left the job before.
  bool has_left(std::uint32_t node) const;
  // Returns the processes that came back and are not in the view that counts.
  std::vector<Peer> strangers() const;
  const std::unordered_map<Peer, Leave>& leaves() const { return leaves_; }
  // Returns the answers that the lost scheduler has given to some members and perhaps not to others: the barriers that
  // have ended, and the groups that have been made.
  std::vector<std::pair<Peer, Message>> owed() const;

 private:
  // Keeps a view that is reported. The members of a large job all report the same one.
  struct Known {
    Membership membership;
    std::unordered_set<std::uint32_t> left;  // nodes that have left the job
  };
  // Keeps the report of a process, without its view.
  struct Report {
    std::uint32_t epoch;
    std::uint64_t identity;  // that of the process
    Rejoin calls;            // without a view
  };

  const Known& last() const { return views_.rbegin()->second; }
  const Membership& view() const { return last().membership; }
  // Returns the connection by which this process is in the view, or else came back from an earlier one; 0: none.
  Peer peer_of(std::uint64_t identity) const;
  bool is_of_view(const Report& report) const { return report.epoch == view().epoch; }

  std::uint64_t run_;
  std::map<std::uint32_t, Known> views_;  // by epoch
  std::unordered_map<Peer, Report> reports_;
  std::unordered_map<std::uint64_t, std::pair<std::uint32_t, Peer>> last_of_;  // by identity: the epoch, the connection
  std::unordered_map<Peer, Leave> leaves_;
};

}  // namespace bps::van
