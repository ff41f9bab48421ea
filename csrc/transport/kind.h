// SPDX-License-Identifier: Apache-2.0
// Lists the transports. Their names appear where people and other processes see them: in settings, in published
// addresses, in logs and in metrics().
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace bps::transport {

enum class Kind : std::uint8_t { kSelf, kShm, kTcp, kRdma };

inline constexpr std::array<std::string_view, 4> kKindNames{"self", "shm", "tcp", "rdma"};
inline constexpr std::size_t kKinds = kKindNames.size();

constexpr std::string_view to_string(Kind kind) {
  return kKindNames[static_cast<std::size_t>(kind)];
}
constexpr std::optional<Kind> parse_kind(std::string_view name) {
  for (std::size_t i = 0; i < kKinds; ++i) {
    if (kKindNames[i] == name) return static_cast<Kind>(i);
  }
  return std::nullopt;
}

}  // namespace bps::transport
