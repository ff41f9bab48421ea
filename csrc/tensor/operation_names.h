// SPDX-License-Identifier: Apache-2.0
// Names operations, and tells ranks that they have called different ones in one round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "tensor/push_header.h"

namespace bps::tensor {

constexpr const char* name_of(OperationKind kind) {
  constexpr const char* kNames[] = {"push_pull",  "reduce_scatter",   "all_gather",
                                    "broadcast",  "push or pull",     "store",
                                    "accumulate", "read of feedback", "write of feedback"};
  return kNames[static_cast<std::size_t>(kind)];
}

inline constexpr const char* kCallAlike =
    "call the same operation with the same arguments for a name on every rank of the group";

struct Caller {
  std::uint32_t rank;
  OperationKind kind;
};

inline std::string different_operations(std::uint32_t round, Caller one, Caller other) {
  if (other.rank < one.rank) std::swap(one, other);
  return "ranks disagree in round " + std::to_string(round) + ": rank " + std::to_string(one.rank) + " called " +
         name_of(one.kind) + ", and rank " + std::to_string(other.rank) + " called " + name_of(other.kind);
}

}  // namespace bps::tensor
