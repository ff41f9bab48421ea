// SPDX-License-Identifier: Apache-2.0
// Ends what a worker loop has under way for a transfer that fails.
//
// An operation that fails is aborted for all ranks: each loop takes what it has not sent off its queues, sends Cancel
// to the servers that hold a part of it, and ends each partition when the server has said that it will not be answered,
// or when its answer has come after all. A server that does not reply counts as lost. A lost server on this host is
// first kept from writing to our memory (DirectAccess::fence()). So no byte changes after the caller has been told.
// Belongs to the loop's thread.
#pragma once

#include <cstddef>

#include "core/metrics.h"
#include "worker/connections.h"
#include "worker/loop_events.h"
#include "worker/operation.h"
#include "worker/partitions_in_flight.h"
#include "worker/reply_watch.h"

namespace bps::worker {

class Cancellation {
 public:
  // `index` is that of the loop.
  Cancellation(std::size_t index, Connections& connections, PartitionsInFlight& partitions, ReplyWatch& watch,
               Counters& counters, const LoopEvents& events)
      : index_(index),
        connections_(connections),
        partitions_(partitions),
        watch_(watch),
        counters_(counters),
        events_(events) {}

  // Fails an operation, unless it is failing, and cancels this loop's part of it.
  void abort(Operation& operation, const Error& why);
  // Does the same for the operation, or the contribution of a host, that this transfer belongs to.
  void abort(Transfer& transfer, ServerConnection& server, const Error& why);
  // Cancels this loop's part of an operation that is failing.
  void cancel(Operation& operation);
  // Ends a partition that has failed, and of which the server says no more. What else belongs to the operation is
  // cancelled.
  void fail(std::uint32_t index, const Error& why, InFlight::End end = InFlight::End::kAborted);
  // Returns this loop's portion of an operation at a place.
  Portion& portion(Operation& operation, std::size_t place) const {
    return operation.portions[index_ * connections_.places() + place];
  }
  std::uint8_t loop() const { return static_cast<std::uint8_t>(index_); }

 private:
  void cancel_transfer(Transfer& transfer, ServerConnection& server);
  void send_cancel(Transfer& transfer, ServerConnection& server);
  void drop_unsent(Transfer& transfer);

  const std::size_t index_;
  Connections& connections_;
  PartitionsInFlight& partitions_;
  ReplyWatch& watch_;
  Counters& counters_;
  const LoopEvents& events_;
};

}  // namespace bps::worker
