// SPDX-License-Identifier: Apache-2.0
// Keeps the landing slots that a server has granted to a loop, as long as they are free, and their keys on each rail of
// the server. Belongs to the loop's thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor/control_messages.h"

namespace bps::worker {

class LandingSlots {
 public:
  // Adds a slot that is granted. Returns false where it is free already, so that a server that grants it again and
  // again costs no memory.
  bool grant(const tensor::SlotCredit& slot) {
    if (free_.size() <= slot.slot) free_.resize(slot.slot + std::size_t{1});
    if (free_[slot.slot]) return false;
    free_[slot.slot] = true;
    (tensor::is_small_slot(slot.capacity) ? small_ : large_).push_back(slot);
    return true;
  }
  // Takes a slot for so many bytes. Returns false while none of that size is free.
  bool take(std::uint64_t bytes, tensor::SlotCredit& slot) {
    auto& slots = tensor::is_small_slot(bytes) && !small_.empty() ? small_ : large_;
    if (slots.empty()) return false;
    slot = slots.back();
    slots.pop_back();
    free_[slot.slot] = false;
    return true;
  }

  // Keeps the keys that credits bring for the rails of the server after the first. Returns false where there are not as
  // many as before, although a server has the same rails for all its slots.
  bool keep_keys(const tensor::Credits& credits) {
    if (credits.other_keys.empty()) return true;
    const std::size_t keys = credits.other_keys.size() / credits.slots.size();
    if (other_rails_ == 0) other_rails_ = keys;
    if (other_rails_ != keys) return false;
    for (std::size_t i = 0; i < credits.slots.size(); ++i) {
      const std::size_t at = credits.slots[i].slot * other_rails_;
      if (rail_keys_.size() < at + other_rails_) rail_keys_.resize(at + other_rails_);
      std::copy_n(credits.other_keys.begin() + static_cast<std::ptrdiff_t>(i * other_rails_), other_rails_,
                  rail_keys_.begin() + static_cast<std::ptrdiff_t>(at));
    }
    return true;
  }
  // Returns the slot's key on a connection to that rail of the server.
  std::uint64_t key(const tensor::SlotCredit& slot, std::size_t rail) const {
    const std::size_t at = slot.slot * other_rails_ + rail - 1;
    return rail == 0 || rail > other_rails_ || at >= rail_keys_.size() ? slot.key : rail_keys_[at];
  }

  std::size_t small() const { return small_.size(); }
  std::size_t large() const { return large_.size(); }

 private:
  std::vector<tensor::SlotCredit> small_;
  std::vector<tensor::SlotCredit> large_;
  std::vector<bool> free_;  // by number
  std::size_t other_rails_ = 0;
  std::vector<std::uint64_t> rail_keys_;  // the keys on the other rails, by slot number
};

}  // namespace bps::worker
