// SPDX-License-Identifier: Apache-2.0
// Describes rails: the NICs, or ports of NICs, by which a process reaches others. A pair of loops has data connections
// over each of them, and shares its traffic among them in proportion to their speeds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace bps::transport {

inline constexpr std::size_t kMostRails = 8;  // those of a process; a host with more NICs has more processes as well

// Names the rails of one connection, as the two processes number their own.
struct Rails {
  std::uint8_t here = 0;
  std::uint8_t there = 0;
  std::uint32_t speed = 0;  // the speed of the slower one in Mbit/s; 0: unknown
};

// Connection number n of a pair of loops takes rail n of both sides. The side that has fewer rails begins again at its
// first, so that no rail of either side stays unused.
inline Rails rails_of(std::size_t connection, std::size_t here, std::size_t there) {
  return {.here = static_cast<std::uint8_t>(connection % std::max<std::size_t>(here, 1)),
          .there = static_cast<std::uint8_t>(connection % std::max<std::size_t>(there, 1))};
}

inline std::string speed_in_words(std::uint32_t mbit) {
  return mbit % 1000 == 0 ? std::to_string(mbit / 1000) + " Gbit/s" : std::to_string(mbit) + " Mbit/s";
}

inline std::uint32_t slower(std::uint32_t one, std::uint32_t other) {
  return one == 0 || other == 0 ? 0 : std::min(one, other);
}

}  // namespace bps::transport
