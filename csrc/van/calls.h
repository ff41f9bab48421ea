// SPDX-License-Identifier: Apache-2.0
// Answers the calls that members make to the scheduler while a job runs: tensors, groups, barriers.
//
// A call that needs a rank which has left or is lost fails at once, and its error names that rank. So do the calls that
// wait already when the rank goes. Belongs to the scheduler's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "van/barrier_state.h"
#include "van/late_rounds.h"
#include "van/member_table.h"
#include "van/registry.h"

namespace bps::van {

// A group of this name is made when the first of its ranks asks for it, and the others find it made. A rank that sends
// something to another one must not wait until that one asks, too, because that one may be waiting for a third.
inline constexpr std::string_view kPairName = "~pair";

class Calls {
 public:
  using Send = std::function<void(Peer, const Message&)>;

  // `on_step` is called when all workers have come to the end of a step and have been told so.
  Calls(MemberTable& members, Registry::Options options, Send send, std::function<void()> on_step = nullptr);

  void declare(const Member& caller, const Declare& call);
  void barrier(const Member& caller, const Barrier& call);
  void new_group(const Member& caller, const NewGroup& call);
  void group_ack(const Member& server, const GroupAck& ack);
  void cancel(const Member& caller, const Cancel& call);
  void late_round(const Member& caller, const LateRound& late);
  // Fails the calls that wait for this member, because it has left or is lost.
  void gone(const Member& member);
  // To be called when a member that has left has closed its connection. It sums for the others no more, so no new group
  // waits for it.
  void disconnected(const Member& member);
  // Tells as JSON which ranks wait in barriers or to form a group, and for whom they wait.
  std::string waiting() const;
  std::string groups() const { return registry_.describe_groups(); }
  const Group* group(std::uint32_t id) const { return registry_.group(id); }
  std::shared_ptr<const Registry::Placements> placements() const { return registry_.placements(); }

  std::uint64_t declared() const { return declared_; }
  std::uint64_t barriers() const { return barriers_; }

 private:
  using GroupKey = std::pair<std::vector<std::uint32_t>, std::string>;
  struct Asked : BarrierState {  // a group that not all of its ranks have asked for
    using BarrierState::BarrierState;
    std::uint32_t first = 0;  // the rank that asked first
  };
  using NewGroups = std::map<GroupKey, Asked>;
  struct Forming {  // a group that some server does not know yet
    std::vector<BarrierState::Caller> callers;
    std::vector<Peer> unaware;
  };

  NewGroups::iterator drop(NewGroups::iterator asked);
  bool fail_if_too_many(std::size_t waiting, const BarrierState::Caller& caller, const std::string& what);
  bool fail_if_gone(const Member& caller, std::uint32_t call, std::span<const std::uint32_t> ranks,
                    const std::string& what);
  void fail(const BarrierState::Caller& caller, ErrorCode code, const std::string& text, const std::string& hint);
  void announce(const Group& group, std::vector<BarrierState::Caller> callers);
  void finish_if_known(std::uint32_t group);
  std::string missing_for(BarrierState::Caller caller);

  MemberTable& members_;
  Registry registry_;
  Send send_;
  std::function<void()> on_step_;
  std::unordered_map<std::uint32_t, BarrierState> barriers_by_group_;
  NewGroups new_groups_;
  std::map<std::uint32_t, Forming> forming_;
  LateRounds late_rounds_;
  std::uint64_t declared_ = 0;
  std::uint64_t barriers_ = 0;
};

}  // namespace bps::van
