// SPDX-License-Identifier: Apache-2.0
// Holds a number that one thread adds to and any thread reads. It is a relaxed atomic without read-modify-write, so
// that counting costs a plain add.
#pragma once

#include <atomic>
#include <cstdint>

namespace bps {

class Counter {
 public:
  void add(std::uint64_t n = 1) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

}  // namespace bps
