// SPDX-License-Identifier: Apache-2.0
// Handles the loss of paths to a server, and of servers. It aborts what needs them, and sees to it that a lost server
// can write no more before callers get their memory back. Belongs to the loop's thread.
#pragma once

#include <cstdint>
#include <string>

#include "core/metrics.h"
#include "transport/reactor.h"
#include "worker/cancellation.h"
#include "worker/connections.h"
#include "worker/device_copies.h"
#include "worker/host_contribution.h"
#include "worker/loop_events.h"
#include "worker/partitions_in_flight.h"

namespace bps::worker {

class ServerLosses {
 public:
  ServerLosses(transport::Reactor& reactor, Connections& connections, PartitionsInFlight& partitions,
               Cancellation& cancellation, HostContributions& contributions, DeviceCopies& copies,
               const LoopEvents& events)
      : reactor_(reactor),
        connections_(connections),
        partitions_(partitions),
        cancellation_(cancellation),
        contributions_(contributions),
        copies_(copies),
        events_(events) {}

  // Asks the job for the cause, if there is anybody to ask, when the connection is broken, or the server breaks the
  // protocol or owes something for too long.
  void report(ServerConnection& server, const std::string& why);
  // Loses a server when the job has named the cause; `why` is a sentence.
  void lose(std::uint32_t node, const std::string& why);
  // Makes the end of the view the cause of what was reported. Aborts what the ranks of this host contribute.
  void end_view(const Error& why);
  // Ends what is under way to servers that have had their time to end. To be called at regular intervals.
  void end_due();
  // Ends all that is still under way to this server, because it will not be answered.
  void end_all_of(ServerConnection& server);
  // Sends what a path has not delivered by the other paths, when both ends of it are closed.
  void settle(ServerConnection& server, const tensor::PathLost& lost);

 private:
  void lose(ServerConnection& server, const std::string& why);

  transport::Reactor& reactor_;
  Connections& connections_;
  PartitionsInFlight& partitions_;
  Cancellation& cancellation_;
  HostContributions& contributions_;
  DeviceCopies& copies_;
  const LoopEvents& events_;
};

}  // namespace bps::worker
