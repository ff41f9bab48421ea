// SPDX-License-Identifier: Apache-2.0
// Computes the speed of a port from the two codes by which verbs tell it.
#pragma once

#include <cstdint>

namespace bps::transport::rdma {

// Returns Mbit/s; 0 for unknown codes. `width` has a bit for each number of lanes, `speed` one for each generation of
// InfiniBand, from SDR to NDR. Ethernet ports tell what comes nearest.
constexpr std::uint32_t port_speed(std::uint8_t width, std::uint8_t speed) {
  const auto lanes = [&]() -> std::uint32_t {
    switch (width) {
      case 1: return 1;
      case 2: return 4;
      case 4: return 8;
      case 8: return 12;
      case 16: return 2;
      default: return 0;
    }
  };
  const auto lane = [&]() -> std::uint32_t {
    switch (speed) {
      case 1: return 2'500;
      case 2: return 5'000;
      case 4:
      case 8: return 10'000;
      case 16: return 14'000;
      case 32: return 25'000;
      case 64: return 50'000;
      case 128: return 100'000;
      default: return 0;
    }
  };
  return lanes() * lane();
}

}  // namespace bps::transport::rdma
