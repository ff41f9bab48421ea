// SPDX-License-Identifier: Apache-2.0
// Room for one partition's elements, of this thread: it grows to the largest partition and stays.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace bps::compress {

// Several may be in use at one time.
enum class Scratch : std::uint8_t { kValues, kSum, kCode, kCount };

// What the last call for the same purpose answered is not valid any more.
inline std::span<float> scratch(Scratch purpose, std::size_t elements) {
  thread_local std::array<std::vector<float>, static_cast<std::size_t>(Scratch::kCount)> rooms;
  std::vector<float>& room = rooms[static_cast<std::size_t>(purpose)];
  if (room.size() < elements) room.resize(elements);
  return {room.data(), elements};
}

}  // namespace bps::compress
