// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <span>

#include "core/bytes.h"

namespace bps {

inline Bytes concatenate(std::initializer_list<std::span<const std::byte>> parts) {
  Bytes all;
  for (const auto part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

}  // namespace bps
