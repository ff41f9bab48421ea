// SPDX-License-Identifier: Apache-2.0
// Passes values between threads by bounded rings, with fixed memory, no locks and no allocation.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <memory>
#include <utility>

namespace bps {

inline constexpr std::size_t kCacheLine = 64;

// Has many producers and one consumer. Each cell carries the ticket of its next turn (D. Vyukov's bounded queue).
template <typename T>
class MpscRing {
 public:
  explicit MpscRing(std::size_t capacity)
      // One cell could not tell full from empty.
      : mask_(std::bit_ceil(capacity < 2 ? 2 : capacity) - 1), cells_(std::make_unique<Cell[]>(mask_ + 1)) {
    for (std::size_t i = 0; i <= mask_; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
  }

  // Returns false when the ring is full; `value` is then untouched.
  bool push(T&& value) {
    std::size_t ticket = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[ticket & mask_];
      const std::size_t turn = cell.turn.load(std::memory_order_acquire);
      if (turn == ticket) {
        if (tail_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed)) {
          cell.value = std::move(value);
          cell.turn.store(ticket + 1, std::memory_order_release);
          return true;
        }
      } else if (turn < ticket) {
        return false;
      } else {
        ticket = tail_.load(std::memory_order_relaxed);
      }
    }
  }

  bool pop(T& value) {
    Cell& cell = cells_[head_ & mask_];
    if (cell.turn.load(std::memory_order_acquire) != head_ + 1) return false;
    value = std::move(cell.value);
    cell.turn.store(head_ + mask_ + 1, std::memory_order_release);
    ++head_;
    return true;
  }

  bool empty() const { return cells_[head_ & mask_].turn.load(std::memory_order_acquire) != head_ + 1; }

 private:
  struct Cell {
    std::atomic<std::size_t> turn;
    T value{};
  };
  const std::size_t mask_;
  std::unique_ptr<Cell[]> cells_;
  alignas(kCacheLine) std::atomic<std::size_t> tail_{0};
  alignas(kCacheLine) std::size_t head_ = 0;
};

}  // namespace bps
