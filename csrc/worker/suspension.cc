// SPDX-License-Identifier: Apache-2.0
#include "worker/suspension.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "worker/callers_memory.h"

namespace bps::worker {

Continuation::Continuation(const Plan& all, std::span<const Begun> only)
    : begun_(only.begin(), only.end()), plan_(all.size()) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::ranges::copy_if(all[i], std::back_inserter(plan_[i]), [&](const Part& part) {
      return std::ranges::binary_search(begun_, part.partition, {}, &Begun::partition);
    });
  }
}

std::uint64_t Continuation::begun(std::uint32_t partition) const {
  return std::ranges::lower_bound(begun_, partition, {}, &Begun::partition)->bytes;
}

void copy_result(const tensor::Extent& extent, std::uint64_t first, const std::byte* from, std::byte* output) {
  std::memcpy(output + extent.output_offset + first, from + first, extent.length - first);
}

std::uint64_t Suspension::begun_before(std::uint32_t partition) const {
  return continuation_ == nullptr ? 0 : continuation_->begun(partition);
}

void Suspension::add(std::uint32_t partition, const Landed& landed) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t in_place = std::max(landed.in_place, begun_before(partition));
  unfinished_.push_back({partition, {landed.aside, in_place}});
}

void Suspension::note_failed() {
  const std::lock_guard lock(mutex_);
  has_failed_ = true;
}

bool Suspension::has_failed() const {
  const std::lock_guard lock(mutex_);
  return has_failed_;
}

std::vector<Begun> Suspension::wanted(bool whole) const {
  const std::lock_guard lock(mutex_);
  std::vector<Begun> found;
  for (const Unfinished& one : unfinished_) {
    const tensor::Extent extent = layout_.extent_of(one.partition);
    if (!extent.wants_data()) continue;
    const bool has_all = one.landed.aside != nullptr || one.landed.in_place == extent.length;
    if (has_all == whole) found.push_back({one.partition, has_all ? extent.length : one.landed.in_place});
  }
  std::ranges::sort(found, {}, &Begun::partition);
  return found;
}

std::vector<Begun> Suspension::begun(std::span<const std::uint32_t> partitions) const {
  const std::lock_guard lock(mutex_);
  std::vector<Begun> found;
  for (const std::uint32_t partition : partitions) {
    const auto one = std::ranges::find(unfinished_, partition, &Unfinished::partition);
    found.push_back({partition, one == unfinished_.end() ? 0 : one->landed.in_place});
  }
  return found;
}

std::vector<Suspension::Unfinished> Suspension::unfinished() const {
  const std::lock_guard lock(mutex_);
  return unfinished_;
}

std::optional<Landed> Suspension::landed_of(std::uint32_t partition) const {
  const std::lock_guard lock(mutex_);
  const auto one = std::ranges::find(unfinished_, partition, &Unfinished::partition);
  return one == unfinished_.end() ? std::nullopt : std::optional(one->landed);
}

std::unique_lock<std::mutex> Suspension::take_arrays() const {
  std::unique_lock lock(in_use_);
  if (is_withdrawn()) {
    throw Error(ErrorCode::kNotInitialized,
                "a thread was interrupted that waited for an operation while another thread went into the next view "
                "with it",
                "call init() again");
  }
  return lock;
}

// These copy without `mutex_`, because a GPU may take its time: nobody else changes what they copy.
void Suspension::read(std::uint32_t partition, std::span<std::byte> into) const {
  const auto lock = take_arrays();
  const tensor::Extent extent = layout_.extent_of(partition);
  const auto landed = landed_of(partition);
  if (!landed || into.size() > extent.length) return;
  const std::size_t first = landed->aside ? std::min<std::size_t>(begun_before(partition), into.size()) : into.size();
  CallersMemory(on_device_).read(into.first(first), request_.output + extent.output_offset);
  if (landed->aside) std::memcpy(into.data() + first, landed->aside->bytes().data() + first, into.size() - first);
}

void Suspension::write(std::uint32_t partition, std::span<const std::byte> from) {
  const auto in_use = take_arrays();
  const tensor::Extent extent = layout_.extent_of(partition);
  if (!extent.wants_data() || from.size() > extent.length) return;
  const auto landed = landed_of(partition);
  if (!landed || landed->aside || from.size() <= landed->in_place) return;
  CallersMemory(on_device_).write(request_.output + extent.output_offset, from);
  const std::lock_guard lock(mutex_);
  const auto one = std::ranges::find(unfinished_, partition, &Unfinished::partition);
  if (one != unfinished_.end()) one->landed.in_place = from.size();
}

void Suspension::take_landed() {
  const std::lock_guard lock(in_use_);
  if (is_withdrawn()) return;  // the other ranks have it all
  CallersMemory memory(on_device_);
  for (const auto& [partition, landed] : unfinished()) {
    const tensor::Extent extent = layout_.extent_of(partition);
    std::byte* const to = request_.output + extent.output_offset;
    if (on_device_ != nullptr && is_own_part_beside(request_, extent)) {
      memory.move(to, request_.input + extent.input_offset, extent.length);
    } else if (landed.aside && extent.wants_data()) {
      const std::uint64_t first = begun_before(partition);
      memory.write(to + first, landed.aside->bytes().subspan(first, extent.length - first));
    }
  }
}

void Suspension::continue_by(const std::function<std::shared_ptr<Operation>()>& launch) {
  const auto lock = take_arrays();
  std::shared_ptr<Operation> next = launch();
  const std::lock_guard known(mutex_);
  resumption_ = Resumption::kContinued;
  continued_by_ = std::move(next);
  unfinished_.clear();
}

void Suspension::resolve(Resumption how) {
  const std::lock_guard lock(mutex_);
  resumption_ = how;
  unfinished_.clear();
}

void Suspension::withdraw() {
  const std::lock_guard lock(in_use_);
  is_withdrawn_.store(true, std::memory_order_release);
}

Resumption Suspension::resumption() const {
  const std::lock_guard lock(mutex_);
  return resumption_;
}

std::shared_ptr<Operation> Suspension::continued_by() const {
  const std::lock_guard lock(mutex_);
  return continued_by_;
}

}  // namespace bps::worker
