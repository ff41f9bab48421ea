// SPDX-License-Identifier: Apache-2.0
#include "worker/suspension.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

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

void Suspension::read(std::uint32_t partition, std::span<std::byte> into) const {
  const tensor::Extent extent = layout_.extent_of(partition);
  const std::lock_guard lock(mutex_);
  const auto one = std::ranges::find(unfinished_, partition, &Unfinished::partition);
  if (one == unfinished_.end() || into.size() > extent.length) return;
  const std::byte* result = output_ + extent.output_offset;
  const std::byte* aside = one->landed.aside ? one->landed.aside->bytes().data() : result;
  const std::size_t first = std::min<std::size_t>(begun_before(partition), into.size());
  std::memcpy(into.data(), result, first);
  std::memcpy(into.data() + first, aside + first, into.size() - first);
}

void Suspension::write(std::uint32_t partition, std::span<const std::byte> from) {
  const tensor::Extent extent = layout_.extent_of(partition);
  const std::lock_guard lock(mutex_);
  if (!extent.wants_data() || from.size() > extent.length) return;
  const auto one = std::ranges::find(unfinished_, partition, &Unfinished::partition);
  if (one == unfinished_.end() || one->landed.aside || from.size() <= one->landed.in_place) return;
  std::memcpy(output_ + extent.output_offset, from.data(), from.size());
  one->landed.in_place = from.size();
}

void Suspension::take_landed() {
  const std::lock_guard lock(mutex_);
  for (const Unfinished& one : unfinished_) {
    const tensor::Extent extent = layout_.extent_of(one.partition);
    if (!one.landed.aside || !extent.wants_data()) continue;
    copy_result(extent, begun_before(one.partition), one.landed.aside->bytes().data(), output_);
  }
}

void Suspension::resolve(Resumption how, std::shared_ptr<Operation> next) {
  const std::lock_guard lock(mutex_);
  resumption_ = how;
  continued_by_ = std::move(next);
  unfinished_.clear();
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
