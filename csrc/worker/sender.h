// SPDX-License-Identifier: Apache-2.0
// Sends the partitions of a worker loop. It takes the most urgent partition for a server that has room, and writes it
// into a landing slot, or posts it to a server on the same host, which reads it in place.
//
// Partitions go out in batches that cost one doorbell. What could fail was set up before an operation entered the send
// queue, so that nothing here registers or throws, and only a table allocates, when it grows to a new largest size. A
// partition that needs a staging buffer waits until one is free, or Admission has made another one. Belongs to the
// loop's thread.
#pragma once

#include <array>
#include <optional>
#include <utility>

#include "core/metrics.h"
#include "tensor/control_messages.h"
#include "tensor/extent.h"
#include "worker/in_flight.h"
#include "worker/server_connection.h"

namespace bps::worker {

class Sender {
 public:
  Sender(InFlightTable& in_flight, Counters& counters, std::uint32_t epoch)
      : in_flight_(in_flight), counters_(counters), epoch_(epoch) {}

  // Limits the bytes that may be under way to one server; 0: no limit.
  void set_budget(std::uint64_t bytes) { budget_ = bytes; }
  // Sends to `server` what there is room for. Returns true when anything went out. What is left stays in the server's
  // queue.
  bool push(ServerConnection& server);
  // Sends again the pushes that a lost path has not delivered, as far as there is room.
  bool repeat(ServerConnection& server);
  // Names the transfer at the head of a queue whose payload could not be read or encoded. take_broken() returns it
  // once, and the transfer must be taken off the queue.
  struct Broken {
    Transfer* transfer = nullptr;
    Status why = Status::kOk;
  };
  Broken take_broken() { return std::exchange(broken_, {}); }

 private:
  struct Batch {
    static constexpr std::size_t kMost = 16;
    std::array<tensor::PushHeader, kMost> headers;
    std::array<transport::WriteOp, kMost> writes;
    std::array<transport::Posting, kMost> postings;
    std::array<tensor::SlotCredit, kMost> slots;
    std::array<std::uint32_t, kMost> entries;
    std::size_t size = 0;
    std::size_t endpoint = 0;  // the number of the server's data connection by which it goes out
    std::uint64_t bytes = 0;
  };

  bool fill(ServerConnection& server);
  Transfer* find_past(const ServerConnection& server);
  bool is_paced(const Transfer& transfer) { return transfer.pace != Transfer::kNoPace && holds_back(transfer); }
  bool holds_back(const Transfer& transfer);
  bool add(ServerConnection& server, Transfer& transfer);
  std::optional<StagingBuffer*> stage(ServerConnection& server, Transfer& transfer, const Part& part,
                                      tensor::Extent& extent, bool& yields);
  Status encode_copied(ServerConnection& server, Transfer& transfer, const Part& part, const tensor::Extent& extent);
  void describe(ServerConnection& server, std::size_t n, std::uint32_t index, const tensor::Extent& extent);
  bool is_within_budget(ServerConnection& server, std::uint64_t length, bool& yields) const;
  StagingBuffer* take_buffer(ServerConnection& server, const Transfer& transfer, bool& yields);
  void write_header(std::size_t n, std::uint32_t index, const tensor::Extent& extent, std::size_t rail);
  std::size_t post(ServerConnection& server);
  void take_back(ServerConnection& server, std::size_t from);
  void trace_sending(const ServerConnection& server);
  void trace_stall(ServerConnection& server);

  InFlightTable& in_flight_;
  Counters& counters_;
  const std::uint32_t epoch_;
  std::uint64_t budget_ = 0;
  Broken broken_;
  bool is_paced_ = false;  // the pace of an operation has just said "not now"
  TraceKey stalled_;       // the partition whose stall the trace has last
  Batch batch_;            // a member, because emptying 4 KiB for each call would cost as much as a push
};

}  // namespace bps::worker
