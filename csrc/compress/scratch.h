// SPDX-License-Identifier: Apache-2.0
// Lends this thread room for one partition's elements, which grows to the largest partition and stays.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace bps::compress {

// Rooms for several purposes may be in use at one time.
enum class Scratch : std::uint8_t { kValues, kSum, kCode, kCount };

// The span of the last call for the same purpose is not valid any more.
inline std::span<float> scratch(Scratch purpose, std::size_t elements) {
  thread_local std::array<std::vector<float>, static_cast<std::size_t>(Scratch::kCount)> rooms;
  std::vector<float>& room = rooms[static_cast<std::size_t>(purpose)];
  if (room.size() < elements) room.resize(elements);
  return {room.data(), elements};
}

}  // namespace bps::compress
