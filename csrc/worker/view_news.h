// SPDX-License-Identifier: Apache-2.0
// Takes the news of a worker's view. The van tells it. An operation that a server has failed may tell of the view's end
// first.
//
// Operations that can no longer complete are aborted, and new ones are refused. Any thread may call it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "van/messages.h"
#include "van/van.h"
#include "worker/declarations.h"
#include "worker/gone_members.h"
#include "worker/late_rounds.h"
#include "worker/planner.h"
#include "worker/view_end.h"
#include "worker/worker_loops.h"

namespace bps::worker {

class ViewNews {
 public:
  // All that is passed by reference must outlive it.
  ViewNews(van::Van& van, const van::Hosts& hosts, const WorkerLoops& loops, Planner& planner,
           Declarations& declarations, std::shared_ptr<ViewEnd> end)
      : van_(van),
        loops_(loops),
        planner_(planner),
        declarations_(declarations),
        view_end_(std::move(end)),
        gone_(van, hosts) {}

  // Returns what is known of members that are gone.
  const GoneMembers& gone() const { return gone_; }
  // Returns what is known of the view's end. An operation that has failed with kRoundAborted tells of it, too.
  const ViewEnd& view_end() const { return *view_end_; }
  // Refuses further operations, and lets rounds that wait for a shift go on, because this process leaves.
  void leave(const Error& why);
  // Follows a new loop of the worker, which watches operations.
  void follow(WorkerLoop& loop);

  // Aborts all operations with kRoundAborted, and refuses further ones.
  void end_view(const Error& why);
  // Aborts the operations that need the member, and refuses further ones. `why` names the cause.
  void lose_node(std::uint32_t node, const std::string& why);
  // Refuses new operations that need the member. Servers decide about those under way: they know what it has
  // contributed to.
  void leave_node(std::uint32_t node, const std::string& why) { gone_.note_left(node, why); }
  // To be called when the scheduler hears a member of which one of our loops hears nothing.
  void on_reachable(std::uint32_t node) const;
  // Fails a tensor that the ranks have declared differently.
  void fail_tensor(std::uint32_t id, const std::string& why);
  // Fails a round in which the ranks have called different operations.
  void fail_round(const van::RoundFailed& failed) const;
  // Returns what the scheduler is to know with the next heartbeat, if anything.
  std::optional<van::LateRound> take_late_round() { return late_rounds_->take(); }
  // Makes rounds wait until the planner's end_shift(), because servers are about to get other weights. Returns the next
  // rounds.
  std::vector<van::TensorRound> begin_shift();

 private:
  van::Van& van_;
  const WorkerLoops& loops_;
  Planner& planner_;
  Declarations& declarations_;
  const std::shared_ptr<ViewEnd> view_end_;
  std::once_flag end_of_view_;
  GoneMembers gone_;
  const std::shared_ptr<LateRounds> late_rounds_ = std::make_shared<LateRounds>();  // loops may outlive the worker
};

}  // namespace bps::worker
