// SPDX-License-Identifier: Apache-2.0
// Takes the news of a worker's view. The van tells it; an operation that a server has failed may tell of its end first.
//
// Operations that can no longer complete are aborted, and new ones refused. Threading: any thread.
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

  // Knows who is gone.
  const GoneMembers& gone() const { return gone_; }
  // Knows it when the view has ended, or an operation has failed with kRoundAborted.
  const ViewEnd& view_end() const { return *view_end_; }
  // Refuses further operations, and calls off a shift: this process leaves.
  void leave(const Error& why);
  // A new loop of the worker watches operations.
  void follow(WorkerLoop& loop);

  // Aborts all operations with kRoundAborted, and refuses further ones.
  void end_view(const Error& why);
  // Aborts the operations that need the member, and refuses further ones. `why` names the cause.
  void lose_node(std::uint32_t node, const std::string& why);
  // Refuses new operations that need the member. Servers decide about those under way: they know what it has
  // contributed to.
  void leave_node(std::uint32_t node, const std::string& why) { gone_.note_left(node, why); }
  // The member runs, although one of our loops hears nothing of it.
  void on_reachable(std::uint32_t node) const;
  // The ranks have declared the tensor differently.
  void fail_tensor(std::uint32_t id, const std::string& why);
  // The ranks have called different operations in this round.
  void fail_round(const van::RoundFailed& failed) const;
  // Returns what the scheduler is to know with the next heartbeat, if anything.
  std::optional<van::LateRound> take_late_round() { return late_rounds_->take(); }
  // Servers are about to have other weights. Rounds wait until the planner's end_shift(); these are the next ones.
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
