// SPDX-License-Identifier: Apache-2.0
// The landing slots that a server has granted to a loop, as long as they are free. Threading: the loop's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tensor/control_messages.h"

namespace bps::worker {

class LandingSlots {
 public:
  // A slot is granted. False: it is free already, and a server that grants it again and again costs no memory.
  bool grant(const tensor::SlotCredit& slot) {
    if (free_.size() <= slot.slot) free_.resize(slot.slot + std::size_t{1});
    if (free_[slot.slot]) return false;
    free_[slot.slot] = true;
    (tensor::is_small_slot(slot.capacity) ? small_ : large_).push_back(slot);
    return true;
  }
  // False while no slot is free that is of the size for so many bytes.
  bool take(std::uint64_t bytes, tensor::SlotCredit& slot) {
    auto& slots = tensor::is_small_slot(bytes) && !small_.empty() ? small_ : large_;
    if (slots.empty()) return false;
    slot = slots.back();
    slots.pop_back();
    free_[slot.slot] = false;
    return true;
  }

  std::size_t small() const { return small_.size(); }
  std::size_t large() const { return large_.size(); }

 private:
  std::vector<tensor::SlotCredit> small_;
  std::vector<tensor::SlotCredit> large_;
  std::vector<bool> free_;  // by number
};

}  // namespace bps::worker
