// SPDX-License-Identifier: Apache-2.0
// Where the rounds of a worker's tensors are summed, in a job whose servers get other weights while it runs: the real
// worker::Shifts and worker::Places, as worker::Planner and worker::ViewNews put them together. Its process has one
// thread: it must not ask for plans while a shift is open, because it would wait for what it alone can do.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "van/hosts.h"
#include "van/messages.h"
#include "worker/places.h"
#include "worker/shifts.h"
#include "worker/tensor.h"

namespace bps::sim {

class Placements {
 public:
  Placements(const van::Membership& members, const van::Hosts& hosts, std::uint32_t rank);

  worker::Plans first(const worker::Tensor& tensor) const { return make(tensor, places_); }
  // A round that has got its number asks.
  std::shared_ptr<const worker::Plans> plans_of(worker::Tensor& tensor, const worker::Request& request,
                                                std::uint32_t round);

  bool is_open() const { return is_open_; }
  // What the scheduler is told: the next round of each tensor.
  std::vector<van::TensorRound> begin(std::span<const std::shared_ptr<worker::Tensor>> tensors);
  void end(const van::EndShift& shift);
  // Nobody decides any more.
  void stop();

  std::uint32_t done() const { return shifts_.done(); }
  // Partitions that a shift has moved away from where they were at first.
  std::uint32_t moved() const { return moved_; }

 private:
  worker::Plans make(const worker::Tensor& tensor, const worker::Places& places) const;
  std::vector<std::size_t> places_of(const worker::Plan& plan, std::size_t partitions) const;

  van::Membership members_;  // with the links that weights follow now
  const van::Hosts hosts_;
  const worker::Places places_;  // of the start
  worker::Shifts shifts_;
  bool is_open_ = false;
  bool is_stopped_ = false;
  std::uint32_t moved_ = 0;
};

}  // namespace bps::sim
