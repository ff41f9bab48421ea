// SPDX-License-Identifier: Apache-2.0
// Defines bytes as the rest of the library passes them around, and the few helpers that the standard library lacks.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace bps {

using Bytes = std::vector<std::byte>;

// Copies spans. memcpy itself requires valid pointers even for zero bytes, and an empty span has none.
inline void copy_bytes(std::span<const std::byte> from, void* to) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}
inline std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace bps
