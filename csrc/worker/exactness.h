// SPDX-License-Identifier: Apache-2.0
// Describes tensors whose sums are exact (server/exact_sum.h). They are declared so, in place of a compression, because
// all ranks must agree.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"
#include "tensor/push_header.h"

namespace bps::worker {

enum class Exactness : std::uint8_t {
  kNone,
  kRounded,  // "exact"
  kToOdd,    // "exact:to_odd", of float64: for a caller that rounds the sum again
};

constexpr std::string_view kExact = "exact";
constexpr std::string_view kExactToOdd = "exact:to_odd";

// Reads what a declaration says. Integers need nothing, because their sums are exact anyway.
constexpr Exactness exactness_of(std::string_view text, Dtype dtype) {
  if (!is_floating(dtype)) return Exactness::kNone;
  return text == kExact ? Exactness::kRounded : text == kExactToOdd ? Exactness::kToOdd : Exactness::kNone;
}
constexpr bool names_exactness(std::string_view text) {
  return text == kExact || text == kExactToOdd;
}

// Returns the reduction of an operation on such a tensor.
constexpr ReduceOp exact_op(ReduceOp op, tensor::OperationKind kind, Exactness exactness) {
  using Kind = tensor::OperationKind;
  const bool adds = kind == Kind::kPushPull || kind == Kind::kReduceScatter || kind == Kind::kSplit;
  if (exactness == Exactness::kNone || !adds) return op;
  if (op == ReduceOp::kAverage) return ReduceOp::kExactAverage;
  if (op != ReduceOp::kSum) return op;
  return exactness == Exactness::kToOdd ? ReduceOp::kExactSumToOdd : ReduceOp::kExactSum;
}

}  // namespace bps::worker
