// SPDX-License-Identifier: Apache-2.0
// Numbers the element types and operations on the wire. The numbers are part of the protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace bps {

enum class Dtype : std::uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kUint8 = 3,
  kInt32 = 4,
  kInt8 = 5,
  kInt64 = 6,
  kBool = 7,
  kBfloat16 = 10,  // 0-6 and 10 are BytePS's numbers
};

enum class ReduceOp : std::uint8_t {
  kSum = 0,
  kAverage = 1,
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  // These are sums of floating-point numbers that are rounded once, at the end: server/exact_sum.h.
  kExactSum = 5,
  kExactAverage = 6,
  kExactSumToOdd = 7,  // only for float64, for a caller that rounds it again
};
constexpr bool is_exact(ReduceOp op) {
  return op >= ReduceOp::kExactSum;
}

// Returns 0 for a value that names no type. Bytes off the wire need no other check.
constexpr std::size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
    case Dtype::kInt64: return 8;
    case Dtype::kFloat32:
    case Dtype::kInt32: return 4;
    case Dtype::kFloat16:
    case Dtype::kBfloat16: return 2;
    case Dtype::kUint8:
    case Dtype::kInt8:
    case Dtype::kBool: return 1;
  }
  return 0;
}

constexpr bool is_floating(Dtype dtype) {
  return dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64 || dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16;
}

// Returns true for the types that compress/ takes.
constexpr bool is_compressible(Dtype dtype) {
  return is_floating(dtype) && dtype != Dtype::kFloat64;
}

constexpr bool is_integer(Dtype dtype) {
  return !is_floating(dtype) && dtype != Dtype::kBool;
}

constexpr std::string_view to_string(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64: return "float64";
    case Dtype::kInt64: return "int64";
    case Dtype::kFloat32: return "float32";
    case Dtype::kInt32: return "int32";
    case Dtype::kFloat16: return "float16";
    case Dtype::kBfloat16: return "bfloat16";
    case Dtype::kUint8: return "uint8";
    case Dtype::kInt8: return "int8";
    case Dtype::kBool: return "bool";
  }
  return "unknown";
}

constexpr bool is_valid(Dtype dtype) {
  return size_of(dtype) != 0;
}
constexpr bool is_valid(ReduceOp op) {
  return op <= ReduceOp::kExactSumToOdd;
}

}  // namespace bps
