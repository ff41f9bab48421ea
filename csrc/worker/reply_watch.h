// SPDX-License-Identifier: Apache-2.0
// Judges servers that owe something for too long, although their connections are open: servers that say nothing at all,
// and servers that owe the end of a partition that was cancelled. Belongs to the loop's thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/clock.h"
#include "worker/connections.h"
#include "worker/in_flight.h"

namespace bps::worker {

class ReplyWatch {
 public:
  // `silence_s` is the time after which a silent server that owes a reply counts as lost.
  explicit ReplyWatch(double silence_s) : silence_s_(silence_s) {}

  // Notes what the server owes from now on, of a partition that was cancelled.
  void owe(InFlight& entry, InFlight::Owed what);

  struct Overdue {
    ServerConnection* server;
    std::string why;  // why it counts as lost
  };
  // To be called at regular intervals. Pings servers that are silent, calls `report` for those that the scheduler is to
  // be asked about, and returns those that count as lost.
  std::vector<Overdue> check(InFlightTable& table, const Connections& connections,
                             const std::function<void(std::uint32_t node)>& report);

 private:
  void check_owed(InFlightTable& table, Clock::time_point now, bool was_stopped, std::vector<Overdue>& found);

  const double silence_s_;
  Clock::time_point last_check_ = Clock::now();
  bool is_owed_ = false;  // some InFlight::owed may be set
};

std::string in_words(double seconds);

}  // namespace bps::worker
