// SPDX-License-Identifier: Apache-2.0
// What benchmarks of passes over memory share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/clock.h"

// Seconds of one call.
double seconds(std::size_t repeats, auto&& function) {
  const std::uint64_t start = bps::now_ns();
  for (std::size_t i = 0; i < repeats; ++i) function();
  return static_cast<double>(bps::now_ns() - start) * 1e-9 / static_cast<double>(repeats);
}

// The same after a call that is not counted: it meets the caches as the other one's turn left them.
double seconds_when_warm(std::size_t repeats, auto&& function) {
  function();
  return seconds(repeats, function);
}

// Zeros stay zeros under addition, so no round meets infinities or subnormals. Starts are aligned to cache lines, as
// landing slots and torch's tensors are, and differ by a few of them: buffers at one offset of their pages would fight
// for the same sets of the cache, which no two slots with headers do.
class Buffers {
 public:
  Buffers(std::size_t count, std::size_t bytes) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t shift = 192 * i;
      memory_.push_back(std::make_unique<std::byte[]>(bytes + shift + kLine));
      const auto start = reinterpret_cast<std::uintptr_t>(memory_.back().get());
      pointers.push_back(memory_.back().get() + (kLine - start % kLine) + shift);
    }
  }
  std::vector<std::byte*> pointers;

 private:
  static constexpr std::size_t kLine = 64;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};
