// SPDX-License-Identifier: Apache-2.0
// Reads and writes encoded bytes, which have no alignment, and puts decoded values into the destination.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>

#include "compress/codec.h"

namespace bps::compress {

static_assert(std::endian::native == std::endian::little, "encoded bytes are little-endian");

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
void store(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(T));
}

template <Into kInto>
void put(float value, float& to) {
  if constexpr (kInto == Into::kReplace) to = value;
  if constexpr (kInto == Into::kAdd) to += value;
  if constexpr (kInto == Into::kSubtract) to -= value;
}

// Calls loop.template operator()<into>(): the choice is made outside of the loop, which then vectorises.
template <typename Loop>
void choose(Into into, Loop loop) {
  switch (into) {
    case Into::kReplace: return loop.template operator()<Into::kReplace>();
    case Into::kAdd: return loop.template operator()<Into::kAdd>();
    case Into::kSubtract: return loop.template operator()<Into::kSubtract>();
  }
}

}  // namespace bps::compress
