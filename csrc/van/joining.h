// SPDX-License-Identifier: Apache-2.0
// Lets processes into a job: each one that asks to join, or comes back to a scheduler that was started anew, is seated,
// waits, or is refused, as the phase of the job decides.
//
// A process waits until all have come, or, to enter a job that is running, until its workers have come to the end of a
// step. Belongs to the scheduler's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "van/job_record.h"
#include "van/patience.h"

namespace bps::van {

class Joining {
 public:
  struct Events {
    std::function<void(Rendezvous::Seating)> on_complete;  // the first view, or a resumed job, has all its members
    std::function<void()> on_back;                         // a member of the view that has ended has come again
    std::function<void()> on_server;                       // a server waits to enter, which needs no end of a step
    std::function<void()> on_reunited;                     // all members of a lost scheduler's view have come back
  };

  Joining(JobRecord& record, const JobEvents& job, Events events)
      : record_(record), job_(job), events_(std::move(events)) {}

  // Both return false where the caller is to close the connection. A process that wants to join then tries again.
  bool join(Peer peer, const Join& join);
  bool rejoin(Peer peer, const Rejoin& report);
  void refuse(Peer peer, const Refused& why);
  std::uint64_t refused() const { return refused_; }

  // Returns true when this peer waits for the others, or is the connection of a member, in this view or the one before.
  bool knows(Peer peer) const;
  bool waits(Peer peer) const { return patience_.has(peer); }
  bool is_empty() const { return patience_.empty(); }
  // Returns when the first of those that wait gives up.
  std::optional<Clock::time_point> deadline() const { return patience_.first(); }
  // To be called when the connection by which a process waits has ended. Returns the member that is lost by that, or
  // null.
  Member* stop_waiting(Peer peer, const std::string& why);
  // Ends all waits, because all have come or need wait no longer. Returns those that waited.
  std::vector<Peer> end_all() { return patience_.end_all(); }

  // ---- Those who wait to enter
  bool has_entrants() const { return !entering_.empty(); }
  std::size_t entering_workers() const;
  // Tells people who enters: "a process on a (pid 1), a process on b (pid 2) enter the job".
  std::string describe_entrants() const;
  std::vector<std::pair<Peer, Node>> take_entrants() { return std::exchange(entering_, {}); }
  // Refuses those who have waited too long to enter. Returns false where there are none.
  bool refuse_late();

 private:
  void gather(Peer peer, const Join& join);
  bool join_again(Peer peer, const Join& join);
  bool resume_server(Peer peer, const Join& join);
  void seat_again(Peer peer, const Join& join, Member& member, Clock::time_point until);
  void enter(Peer peer, const Join& join);

  JobRecord& record_;
  const JobEvents& job_;
  const Events events_;
  Patience patience_;  // until when each process waits
  std::vector<std::pair<Peer, Node>> entering_;
  std::uint64_t refused_ = 0;
};

}  // namespace bps::van
