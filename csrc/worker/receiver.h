// SPDX-License-Identifier: Apache-2.0
// Takes in what servers write and say to a worker loop. The connections hand everything over to it.
//
// An answer's bytes are in place already, unless they were staged. Where results are final with the answer it completes
// its partition; in two phases the server is told that it has landed, and Committed completes the partition. Belongs to
// the loop's thread.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "core/metrics.h"
#include "tensor/control_messages.h"
#include "worker/cancellation.h"
#include "worker/connections.h"
#include "worker/device_copies.h"
#include "worker/host_contribution.h"
#include "worker/partitions_in_flight.h"
#include "worker/reply_watch.h"
#include "worker/server_losses.h"

namespace bps::worker {

class Receiver {
 public:
  // These are the parts of the loop that it works with.
  struct Rooms {
    Connections& connections;
    PartitionsInFlight& partitions;
    ReplyWatch& watch;
    Cancellation& cancellation;
    ServerLosses& losses;
    HostContributions& contributions;
    DeviceCopies& copies;
  };
  Receiver(std::uint32_t epoch, std::string name, const Rooms& rooms, Counters& counters)
      : epoch_(epoch), name_(std::move(name)), rooms_(rooms), counters_(counters) {}

  // `over` is the connection by which the answer came, or null where the server writes to our memory itself. `landed`
  // is how many of its bytes the connection knows to be here. A server that sends more or fewer bytes than the
  // partition has is lost.
  void on_answer(ServerConnection& server, std::uint32_t immediate, const transport::DataEndpoint* over = nullptr,
                 std::uint64_t landed = 0);
  void on_message(ServerConnection& server, std::span<const std::byte> message);
  void on_lost(ServerConnection& server, const std::string& why) { rooms_.losses.report(server, why); }
  void count_stale() { counters_.stale.add(); }
  // Notes that an answer has come in which the server keeps until it is told.
  void note_receipt() { rooms_.connections.note_receipt(); }
  // Returns the partitions, which connections tell what they know of single ones.
  PartitionsInFlight& partitions() { return rooms_.partitions; }
  // Returns the error of a codec that has failed in its last call.
  Error codec_failure() const;

 private:
  [[gnu::cold]] void lose_for_length(ServerConnection& server, std::uint64_t landed, std::uint64_t due);
  void on_landed(ServerConnection& server, InFlight& entry, std::uint32_t immediate);
  bool take_answer(ServerConnection& server, std::uint32_t immediate);
  void on_committed(ServerConnection& server, const tensor::Committed& committed);
  void on_push_failed(ServerConnection& server, const tensor::PushFailed& failed);
  void on_cancelled(ServerConnection& server, const tensor::Cancelled& cancelled);

  const std::uint32_t epoch_;
  const std::string name_;
  const Rooms rooms_;
  Counters& counters_;
};

}  // namespace bps::worker
