// SPDX-License-Identifier: Apache-2.0
#include "server/slot_window.h"

#include <algorithm>

namespace bps::server {
namespace {

constexpr std::uint32_t kSmallSlots = 128;  // 1 MiB per worker loop
constexpr std::uint32_t kFewestSmallSlots = 8;
constexpr std::size_t kMostCredits = (transport::kMaxMessage - 32) / sizeof(tensor::SlotCredit);

}  // namespace

void SlotWindow::open(std::uint64_t largest_payload, std::uint32_t large_slots, std::uint64_t memory) {
  std::uint64_t large = large_slots;
  std::uint64_t small = kSmallSlots;
  if (memory > 0) {  // one eighth for small slots, the rest for large ones
    small = std::clamp<std::uint64_t>(memory / 8 / tensor::kSmallSlot, kFewestSmallSlots, kSmallSlots);
    large = std::clamp<std::uint64_t>(memory / 8 * 7 / (largest_payload + transport::kMaxHeader), 1, large_slots);
  }
  open_ = true;
  largest_payload_ = largest_payload;
  credits_.reserve(large + small);
  pool_.reserve(largest_payload, large);
  for (std::uint64_t i = 0; i < large; ++i) grant(pool_.take(largest_payload));
  pool_.reserve(kSmallPayload, small);  // possibly of the same size class, so not before the large ones are taken
  for (std::uint64_t i = 0; i < small; ++i) grant(pool_.take(kSmallPayload));
}

void SlotWindow::close() {
  open_ = false;
  note_starved();
  credits_.clear();
  pool_.reclaim(*this);
}

void SlotWindow::grant(Slot* slot) {
  slot->window = this;
  slot->granted = true;
  ++free_of_size(*slot);
  note_starved();
  const transport::RemoteSpan where = pool_.region(*slot, transport_).remote(slot->offset, slot->capacity);
  credits_.push_back({slot->number, where.key, where.address, slot->capacity});
  sends_due_.credits = true;
}

void SlotWindow::release(Slot* slot, SlotPool& pool) {
  if (slot->window == nullptr || !slot->window->open_ || slot->overflow) {
    pool.give_back(slot);
  } else {
    slot->window->grant(slot);
  }
}

bool SlotWindow::begin_fill(Slot& slot, const transport::DataEndpoint& by, const transport::RemoteSpan& where) {
  if (slot.window != this || !slot.granted || slot.filled_by != nullptr || where.length > slot.capacity) return false;
  const transport::RemoteSpan granted = pool_.region(slot, transport_).remote(slot.offset, slot.capacity);
  if (where.key != granted.key || where.address != granted.address) return false;
  slot.filled_by = &by;
  return true;
}

void SlotWindow::grant_overflow() {
  pool_.reserve(largest_payload_, 1);
  Slot* slot = pool_.take(largest_payload_);
  slot->overflow = true;
  grant(slot);
}

void SlotWindow::send_credits(transport::ControlEndpoint& control) {
  for (std::size_t at = 0; at < credits_.size(); at += kMostCredits) {
    const auto first = credits_.begin() + static_cast<std::ptrdiff_t>(at);
    const auto count = std::min(kMostCredits, credits_.size() - at);
    (void)control.send(encode(tensor::Credits{{first, first + static_cast<std::ptrdiff_t>(count)}}, epoch_));
  }
  credits_.clear();
}

}  // namespace bps::server
