// SPDX-License-Identifier: Apache-2.0
// Loses paths to a server, and servers: aborts what needs them, and sees to it that a lost server can write no more
// before callers get their memory back. Threading: the loop's.
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

  // The connection is broken, or the server breaks the protocol or owes something for too long. The job is asked for
  // the cause, if there is anybody to ask.
  void report(ServerConnection& server, const std::string& why);
  // The job has named the cause: `why` is a sentence.
  void lose(std::uint32_t node, const std::string& why);
  // The view has ended, which is the cause of what was reported. Aborts what the ranks of this host contribute.
  void end_view(const Error& why);
  // Ends what is under way to servers that have had their time to end. To be called at regular intervals.
  void end_due();
  // Nothing that is still under way to this server will be answered.
  void end_all_of(ServerConnection& server);
  // Both ends of a path are closed: what it has not delivered goes out by the others.
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
