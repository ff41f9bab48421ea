// SPDX-License-Identifier: Apache-2.0
// Sums over a partition in an order that does not depend on the instruction set. Element i belongs to lane i % 16.
// Lanes add up in float64, and are added from the first to the last.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <span>

namespace bps::compress {

template <typename Map>
double sum_in_lanes(std::span<const float> values, Map map) {
  constexpr std::size_t kLanes = 16;
  std::array<double, kLanes> lanes{};
  const std::size_t whole = values.size() / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += map(values[i + lane]);
  }
  for (std::size_t i = whole; i < values.size(); ++i) lanes[i - whole] += map(values[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

inline double sum_of_magnitudes(std::span<const float> values) {
  return sum_in_lanes(values, [](float value) { return static_cast<double>(std::fabs(value)); });
}

inline double sum_of_squares(std::span<const float> values) {
  return sum_in_lanes(values, [](float value) { return static_cast<double>(value) * static_cast<double>(value); });
}

}  // namespace bps::compress
