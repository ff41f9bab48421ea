// SPDX-License-Identifier: Apache-2.0
// Judges servers that owe something for too long, although their connections are open: servers that say nothing at all,
// and servers that owe the end of a partition that was cancelled. Threading: the loop's.
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
  // `silence_s`: after that time a server that owes a reply counts as lost.
  explicit ReplyWatch(double silence_s) : silence_s_(silence_s) {}

  // The server owes this from now on, of a partition that was cancelled.
  void owe(InFlight& entry, InFlight::Owed what);

  struct Overdue {
    ServerConnection* server;
    std::string why;  // it counts as lost
  };
  // Asked at regular intervals. Pings those that are silent, and calls `report` for those that the scheduler is to be
  // asked about.
  std::vector<Overdue> check(InFlightTable& table, const Connections& connections,
                             const std::function<void(std::uint32_t node)>& report);

 private:
  void check_owed(InFlightTable& table, Clock::time_point now, bool was_stopped, std::vector<Overdue>& found);

  const double silence_s_;
  Clock::time_point last_check_ = Clock::now();
  bool is_owed_ = false;  // perhaps: some InFlight::owed is set
};

std::string in_words(double seconds);

}  // namespace bps::worker
