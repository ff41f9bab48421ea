// SPDX-License-Identifier: Apache-2.0
// Passes questions about what the members are doing on to all of them, and their replies back to the peer that asked.
//
// Nothing waits here: the peer that asked decides how long it listens. Belongs to the scheduler's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "core/clock.h"
#include "van/member_table.h"
#include "van/messages.h"

namespace bps::van {

class Inquiries {
 public:
  explicit Inquiries(std::function<void(Peer, const Message&)> send) : send_(std::move(send)) {}

  // Asks all members, and tells the peer the `state` of the scheduler, as JSON. Has no effect while members are still
  // to reply to this peer, or to many others.
  void ask(Peer from, const Ask& ask, MemberTable& members, const std::function<std::string()>& state);
  void reply(const Member& from, const Reply& reply);
  void closed(Peer from);

 private:
  struct Inquiry {
    std::uint64_t number;
    Peer from;
    std::uint32_t call;
    std::size_t left;  // members that have not replied
    Clock::time_point since;
  };

  const std::function<void(Peer, const Message&)> send_;
  std::deque<Inquiry> open_;
  std::uint64_t last_number_ = 0;
};

// Tells what the scheduler knows of its members, as JSON; `silence_ms` returns for how long it has heard nothing of a
// peer.
std::string describe_members(MemberTable& members, const std::function<std::int64_t(Peer)>& silence_ms);

}  // namespace bps::van
