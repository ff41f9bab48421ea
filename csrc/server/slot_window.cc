// SPDX-License-Identifier: Apache-2.0
#include "server/slot_window.h"

#include <algorithm>

namespace bps::server {
namespace {

constexpr std::uint32_t kSmallSlots = 128;  // 1 MiB per worker loop
constexpr std::uint32_t kFewestSmallSlots = 8;
constexpr std::size_t kCreditBytes = transport::kMaxMessage - 64;  // those of one message

}  // namespace

void SlotWindow::open(std::uint64_t largest_payload, std::uint32_t large_slots, std::uint64_t memory) {
  std::uint64_t large = large_slots;
  std::uint64_t small = kSmallSlots;
  if (memory > 0) {  // one eighth is for small slots, the rest for large ones
    small = std::clamp<std::uint64_t>(memory / 8 / tensor::kSmallSlot, kFewestSmallSlots, kSmallSlots);
    large = std::clamp<std::uint64_t>(memory / 8 * 7 / (largest_payload + transport::kMaxHeader), 1, large_slots);
  }
  open_ = true;
  largest_payload_ = largest_payload;
  credits_.slots.reserve(large + small);
  pool_.reserve(largest_payload, large);
  for (std::uint64_t i = 0; i < large; ++i) grant(pool_.take(largest_payload));
  pool_.reserve(kSmallPayload, small);  // possibly of the same size class, so not before the large ones are taken
  for (std::uint64_t i = 0; i < small; ++i) grant(pool_.take(kSmallPayload));
}

void SlotWindow::close() {
  open_ = false;
  note_starved();
  credits_.slots.clear();
  credits_.other_keys.clear();
  small_.untold = large_.untold = 0;
  pool_.reclaim(*this);
}

void SlotWindow::grant(Slot* slot) {
  slot->window = this;
  slot->granted = true;
  Grants& grants = of_size(*slot);
  ++grants.free;
  ++grants.untold;
  note_starved();
  const transport::Region& region = pool_.region(*slot, transport_);
  const transport::RemoteSpan where = region.remote(slot->offset, slot->capacity);
  credits_.slots.push_back({tensor::SlotNumber(slot->number), where.key, where.address, slot->capacity});
  credits_.other_keys.insert(credits_.other_keys.end(), region.other_keys().begin(), region.other_keys().end());
  note_due();
}

void SlotWindow::release(Slot* slot, SlotPool& pool) {
  if (slot->window == nullptr || !slot->window->open_ || slot->overflow) {
    pool.give_back(slot);
  } else {
    slot->window->grant(slot);
  }
}

bool SlotWindow::begin_fill(Slot& slot, const transport::DataEndpoint& from, const transport::RemoteSpan& where) {
  if (slot.window != this || !slot.granted || slot.filled_by != nullptr || where.length > slot.capacity) return false;
  const transport::RemoteSpan granted = pool_.region(slot, transport_).remote(slot.offset, slot.capacity);
  if (where.key != granted.key || where.address != granted.address) return false;
  slot.filled_by = &from;
  return true;
}

void SlotWindow::grant_overflow() {
  pool_.reserve(largest_payload_, 1);
  Slot* slot = pool_.take(largest_payload_);
  slot->overflow = true;
  grant(slot);
}

void SlotWindow::send_credits(transport::ControlPaths& control) {
  if (!is_due()) return;
  const std::size_t keys = credits_.other_keys.size() / credits_.slots.size();
  const std::size_t most = kCreditBytes / (sizeof(tensor::SlotCredit) + keys * sizeof(std::uint64_t));
  if (credits_.slots.size() <= most) {
    (void)control.send(encode(credits_, epoch_));
  } else {
    const auto part = [](const auto& all, std::size_t from, std::size_t to) {
      return std::vector(all.begin() + static_cast<std::ptrdiff_t>(from),
                         all.begin() + static_cast<std::ptrdiff_t>(to));
    };
    for (std::size_t at = 0; at < credits_.slots.size(); at += most) {
      const std::size_t end = std::min(at + most, credits_.slots.size());
      const tensor::Credits some{part(credits_.slots, at, end), part(credits_.other_keys, at * keys, end * keys)};
      (void)control.send(encode(some, epoch_));
    }
  }
  credits_.slots.clear();
  credits_.other_keys.clear();
  small_.untold = large_.untold = 0;
}

}  // namespace bps::server
