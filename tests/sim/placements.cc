// SPDX-License-Identifier: Apache-2.0
#include "placements.h"

#include <algorithm>
#include <utility>

#include "trace.h"

namespace bps::sim {
namespace {

// Places as csrc/node/view_worker.cc makes them.
worker::Places first_places(const van::Membership& members, const van::Hosts& hosts, std::uint32_t rank) {
  tensor::KeyMapConfig keys{.servers = members.servers, .slots = members.server_of_slot()};
  keys.workers = members.workers;
  std::vector<std::uint32_t> own_server;
  for (std::uint32_t i = 0; i < members.workers && members.worker(i)->server_rank >= 0; ++i) {
    own_server.push_back(static_cast<std::uint32_t>(members.worker(i)->server_rank));
  }
  return {keys, van::ServerPlaces(members), van::ServerWeights::of_job(members, hosts), own_server, hosts, rank};
}

}  // namespace

Placements::Placements(const van::Membership& members, const van::Hosts& hosts, std::uint32_t rank)
    : members_(members), hosts_(hosts), places_(first_places(members, hosts, rank)) {}

worker::Plans Placements::make(const worker::Tensor& tensor, const worker::Places& places) const {
  worker::Plans made;
  made.whole = places.plan(tensor, tensor.whole, false, {}, 1);
  made.sharded = places.plan(tensor, tensor.sharded, true, {}, 1);
  return made;
}

std::vector<std::size_t> Placements::places_of(const worker::Plan& plan, std::size_t partitions) const {
  std::vector<std::size_t> places(partitions);
  for (std::size_t place = 0; place < plan.size(); ++place) {
    for (const worker::Part& part : plan[place]) places[part.partition] = part.for_host() ? part.place : place;
  }
  return places;
}

std::shared_ptr<const worker::Plans> Placements::plans_of(worker::Tensor& tensor, const worker::Request& request,
                                                          std::uint32_t round) {
  if (is_open_) throw Violation("a process asks for plans that it has to wait for");
  if (shifts_.is_at_rest()) return nullptr;
  return shifts_.plans_of(tensor, request, round, [&](std::uint32_t shift, const worker::Places& places) {
    auto made = std::make_shared<worker::Plans>(make(tensor, places));
    made->shift = shift;
    const std::vector<std::size_t> now = places_of(made->whole, tensor.whole.count());
    const std::vector<std::size_t> first = places_of(tensor.plans.whole, tensor.whole.count());
    for (std::size_t i = 0; i < now.size(); ++i) moved_ += now[i] == first[i] ? 0 : 1;
    return made;
  });
}

std::vector<van::TensorRound> Placements::begin(std::span<const std::shared_ptr<worker::Tensor>> tensors) {
  shifts_.begin();
  is_open_ = !is_stopped_;
  std::vector<van::TensorRound> next;
  for (const auto& tensor : tensors) {
    const auto [early, late] = std::minmax({tensor->next_round.load(), tensor->next_pull.load()});
    if (late > 0 && !shifts_.is_early(*tensor, early)) next.push_back({tensor->group->id, tensor->id, late});
  }
  return next;
}

void Placements::end(const van::EndShift& shift) {
  is_open_ = false;
  if (shift.links.empty()) return shifts_.call_off();
  for (std::size_t i = 0; i < members_.nodes.size(); ++i) members_.nodes[i].link = shift.links.at(i);
  shifts_.end(places_.with(*van::ServerWeights::of_job(members_, hosts_)), shift.from);
}

void Placements::stop() {
  is_open_ = false;
  is_stopped_ = true;
  shifts_.stop();
}

}  // namespace bps::sim
