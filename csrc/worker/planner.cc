// SPDX-License-Identifier: Apache-2.0
#include "worker/planner.h"

#include <algorithm>

namespace bps::worker {

Planner::Planner(const WorkerOptions& options, const van::Van& van)
    : options_(options),
      van_(van),
      places_(options.key_map, options.server_places, options.weights, options.own_server, options.hosts,
              static_cast<std::uint32_t>(van.self().worker_rank)),
      late_connections_(places_.count()) {}

void Planner::add_loop(std::span<const std::size_t> connected) {
  ++loops_;
  late_connections_.add_loop(connected);
}

Plans Planner::make(const Tensor& tensor, const Places& places, std::span<const std::uint64_t> load) {
  Plans plans;
  plans.whole = places.plan(tensor, tensor.whole, false, load, loops_);
  plans.sharded = places.plan(tensor, tensor.sharded, true, load, loops_);
  if (options_.hosts.active()) {  // without relays every connection is there
    late_connections_.make(plans.whole);
    late_connections_.make(plans.sharded);
  }
  return plans;
}

// Looks at the state of shifts after the round has got its number. So either this rank has told the number to the
// scheduler, or the round waits.
std::shared_ptr<const Plans> Planner::of_round(Tensor& tensor, const Request& request, std::uint32_t round) {
  if (shifts_.is_at_rest()) [[likely]]
    return nullptr;
  return shifts_.plans_of(tensor, request, round, [&](std::uint32_t shift, const Places& places) {
    auto made = std::make_shared<Plans>(make(tensor, places, {}));
    made->shift = shift;
    return made;
  });
}

Deal Planner::deal(std::span<const std::shared_ptr<Tensor>> tensors) const {
  const auto latest = shifts_.latest();
  return (latest ? *latest : places_).deal(tensors);
}

van::Membership Planner::membership() const {
  van::Membership members = van_.membership();
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < links_.size(); ++i) members.nodes[i].link = links_[i];
  return members;
}

std::vector<van::TensorRound> Planner::next_rounds(std::span<const std::shared_ptr<Tensor>> tensors) {
  std::vector<van::TensorRound> next;
  for (const auto& tensor : tensors) {
    const auto [early, late] = std::minmax({tensor->next_round.load(), tensor->next_pull.load()});
    // A tensor whose push() is ahead of its pull() is left out while the pull could still need the placement before.
    // The scheduler calls off a shift that leaves out a tensor which had a part in the one before.
    if (late > 0 && !shifts_.is_early(*tensor, early)) next.push_back({tensor->group->id, tensor->id, late});
  }
  std::ranges::sort(next, {}, &van::TensorRound::key);
  return next;
}

void Planner::end_shift(const van::EndShift& shift) {
  if (shift.links.size() != van_.membership().nodes.size()) return shifts_.call_off();
  {
    const std::lock_guard lock(mutex_);
    links_ = shift.links;
  }
  const auto weights = van::ServerWeights::of_job(membership(), options_.hosts);
  if (!weights) return shifts_.call_off();
  shifts_.end(places_.with(*weights), shift.from);
}

}  // namespace bps::worker
