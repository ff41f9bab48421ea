// SPDX-License-Identifier: Apache-2.0
#include "worker/shifts.h"

#include <algorithm>
#include <utility>

namespace bps::worker {
namespace {

bool stays(const Tensor& tensor, const Request& request) {
  if (request.kind >= tensor::OperationKind::kStore) return true;
  return tensor.compressor && tensor.compressor->remembers();
}

std::uint64_t key_of(const Tensor& tensor) {
  return van::TensorRound{tensor.group->id, tensor.id, 0}.key();
}

bool is_before(const std::map<std::uint64_t, std::uint32_t>& from, const Tensor& tensor, std::uint32_t round) {
  const auto found = from.find(key_of(tensor));
  return found != from.end() && round < found->second;
}

}  // namespace

void Shifts::begin() {
  const std::lock_guard lock(mutex_);
  if (!stopped_) state_ |= kOpen;
}

void Shifts::call_off() {
  const std::lock_guard lock(mutex_);
  state_ &= ~kOpen;
  changed_.notify_all();
}

void Shifts::end(std::shared_ptr<const Places> places, std::span<const van::TensorRound> from) {
  const std::lock_guard lock(mutex_);
  std::rotate(known_.begin(), known_.end() - 1, known_.end());
  known_.front() = {std::move(places), {}};
  for (const van::TensorRound& first : from) known_.front().from[first.key()] = first.round;
  state_ = (state_ / 2 + 1) * 2;
  changed_.notify_all();
}

void Shifts::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  state_ &= ~kOpen;
  changed_.notify_all();
}

bool Shifts::is_early(const Tensor& tensor, std::uint32_t round) {
  const std::lock_guard lock(mutex_);
  return is_before(known_.front().from, tensor, round);
}

std::shared_ptr<const Plans> Shifts::plans_of(Tensor& tensor, const Request& request, std::uint32_t round,
                                              const Make& make) {
  if (stays(tensor, request)) return nullptr;
  std::shared_ptr<const Places> places;
  std::uint32_t shift = 0;
  {
    std::unique_lock lock(mutex_);
    // Neither the caller's deadline nor a Ctrl-C ends this wait: a round that has its number must begin, or fail on all
    // ranks. The wait ends with the shift, with the loss of the scheduler, or when this process leaves.
    changed_.wait(lock, [this] { return (state_ & kOpen) == 0; });
    const auto found =
        std::ranges::find_if_not(known_, [&](const Placement& one) { return is_before(one.from, tensor, round); });
    if (found == known_.end()) {  // the calling thread has slept through two whole shifts
      throw Error(ErrorCode::kTimeout, "'" + tensor.name + "' was started too slowly: its servers have changed twice",
                  "give this process more processor time");
    }
    places = found->places;
    if (!places) return nullptr;
    shift = state_ / 2 - static_cast<std::uint32_t>(found - known_.begin());
    for (const auto& known : tensor.shifted) {
      if (known && known->shift == shift) return known;
    }
  }
  auto made = make(shift, *places);
  const std::lock_guard lock(mutex_);
  for (const auto& known : tensor.shifted) {
    if (known && known->shift == shift) return known;  // another thread was faster
  }
  return tensor.shifted[shift % tensor.shifted.size()] = std::move(made);
}

}  // namespace bps::worker
