// SPDX-License-Identifier: Apache-2.0
// Keeps the partitions of a worker loop that are on their way to servers, and ends each of them: with its answer, or
// without it once the transport reads its bytes no more. What has come of an answer that is not final is kept for the
// next view (docs/notes/members.md "When a server is lost"). Belongs to the loop's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/metrics.h"
#include "worker/in_flight.h"
#include "worker/server_connection.h"

namespace bps::worker {

class PartitionsInFlight {
 public:
  explicit PartitionsInFlight(Counters& counters) : counters_(counters) {}

  // Returns the partition that an immediate from a server names, or nullptr, which is counted.
  InFlight* find(std::uint32_t immediate, const ServerConnection& server);
  // Decides whether the server may write an answer there, as DataSink::allows_write() says.
  std::size_t allows_answer(const ServerConnection& server, std::size_t rail, const transport::RemoteSpan& where,
                            std::uint32_t immediate) const;
  // Notes that so many bytes of an answer had come over the input when its connection ended.
  void note_cut_off(const ServerConnection& server, std::uint32_t immediate, std::uint64_t bytes);
  // Notes that the transport reads the bytes of a push no more, whether they have left or not.
  void note_unread(const ServerConnection& server, std::uint32_t immediate);
  // Notes the same of a push whose path is closed, unless it is over and another one has its entry.
  void note_given_up(const ServerConnection& server, const SentPush& push);
  // Returns the keys of the memory that answers of the server are still to go to: those on one rail, and on another.
  std::vector<tensor::AnswerKeys::Key> answer_keys(const ServerConnection& server, std::size_t rail,
                                                   std::size_t other) const;

  // Takes an answer out of its buffer. Returns kProtocol where it is no result; compress/codec_call.h explains kCodec.
  Status take_answer(const InFlight& entry);
  // Ends a partition whose result is where it belongs.
  void complete(std::uint32_t index);
  // Ends a partition of which nothing more comes, unless a device copies its result.
  void end_unanswered(std::uint32_t index) {
    if (!table[index].is_copying()) finish(index, false);
  }
  // Does the same, as soon as the transport does not read its bytes any more.
  void end_when_unread(std::uint32_t index, InFlight::End end = InFlight::End::kAborted);

  InFlightTable table;

 private:
  void finish(std::uint32_t index, bool answered);
  Landed landed_of(std::uint32_t index);
  bool suspend(std::uint32_t index);

  Counters& counters_;
};

}  // namespace bps::worker
