// SPDX-License-Identifier: Apache-2.0
// Finds the round that a push belongs to, and refuses a push that has none.
//
// A push is refused with PushFailed, which is counted, where its header is not one that its sender may send, its round
// is over or has failed, or its group has lost a member. Ranks that disagree fail a round that is not summed. Belongs
// to the server loop's thread.
#pragma once

#include "server/host_relay.h"
#include "server/push.h"

namespace bps::server {

class PushAdmission {
 public:
  // All of these must outlive it.
  struct Parts {
    RoundTable& table;
    RoundGroups& groups;
    const GoneRanks& gone;
    RoundEnds& ends;
    HostRelay& relay;
    CompressedSummer& compressed;
    Counters& counters;
    std::uint64_t largest_partition;  // in bytes; more is refused
  };
  explicit PushAdmission(const Parts& parts) : parts_(parts) {}

  // Returns the round, and sets `contributor` of the push. Returns nullptr where the push is refused or ignored.
  Round* admit(Push& push);
  // Loses a sender that makes a server keep more than it can wait for.
  void reject(WorkerSession& session);

 private:
  std::uint64_t largest(const tensor::PushHeader& header) const {
    const bool for_host = (header.flags & tensor::kForHost) != 0;
    return for_host ? parts_.relay.largest(header, parts_.largest_partition) : parts_.largest_partition;
  }
  void refuse_faulty(const Push& push, const char* fault);
  void refuse_repeated(const Push& push);
  void refuse_round(const Push& push, const RoundGroup& group, RoundTable::Found found);
  bool refuse_gone(const Push& push, const RoundGroup& group);
  void refuse_failed(Round& round, const Push& push);
  void disagree(Round& round, const Push& push);

  const Parts parts_;
};

}  // namespace bps::server
