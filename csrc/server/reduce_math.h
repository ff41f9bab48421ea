// SPDX-License-Identifier: Apache-2.0
// Offers arithmetic on vectors of the width of the including file's instruction set. It is only for reduce_<isa>.cc, by
// way of reduce_kernels.h.
//
// The unnamed namespace is the point: every including file gets its own copy, compiled with its own flags (see
// reduce_isa.h). GCC's vector types are used because one source then serves all widths and keeps accumulators in
// registers, which auto-vectorisation of a loop over sources does not. No multiplication here feeds an addition, so no
// compiler can fuse them and all instruction sets agree to the bit.
#pragma once

#include "server/reduce_isa.h"

namespace bps::server {
namespace {

#if defined(__AVX512BW__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif

template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));  // NOLINT: the attributes need a typedef
  typedef T Anywhere __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
};
template <typename T>
using Vector = typename VectorOf<T>::Type;

// This is no memcpy, of which gcc 12 makes two halves where the vector has 32 bytes.
template <typename T>
Vector<T> load_vector(const std::byte* from) {
  return *reinterpret_cast<const typename VectorOf<T>::Anywhere*>(from);
}
template <typename T>
void store_vector(std::byte* to, Vector<T> from) {
  *reinterpret_cast<typename VectorOf<T>::Anywhere*>(to) = from;
}

using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;

template <typename T>
struct FloatMath {
  using Lane = T;
  using Lanes = Vector<T>;

  // Both ways round the exact quotient once, so the result is sum / divisor to the bit; multiplying is faster, and
  // right only where the reciprocal is exact.
  struct Divisor {
    explicit Divisor(std::uint32_t divisor)
        : value(static_cast<T>(divisor)), reciprocal(T{1} / value), is_power_of_two((divisor & (divisor - 1)) == 0) {}
    T value;
    T reciprocal;
    bool is_power_of_two;
  };

  static Lanes add(Lanes a, Lanes b) { return a + b; }
  static Lanes multiply(Lanes a, Lanes b) { return a * b; }
  // These do as numpy.minimum and numpy.maximum: NaN wins.
  static Lanes minimum(Lanes a, Lanes b) { return ((a < b) | (a != a)) ? a : b; }
  static Lanes maximum(Lanes a, Lanes b) { return ((a > b) | (a != a)) ? a : b; }
  static Lanes divide(Lanes a, const Divisor& by) { return by.is_power_of_two ? a * by.reciprocal : a / by.value; }
};

template <typename T>
struct UnsignedOf;
template <>
struct UnsignedOf<std::uint8_t> {
  using Type = std::uint8_t;
};
template <>
struct UnsignedOf<std::int8_t> {
  using Type = std::uint8_t;
};
template <>
struct UnsignedOf<std::int32_t> {
  using Type = std::uint32_t;
};
template <>
struct UnsignedOf<std::int64_t> {
  using Type = std::uint64_t;
};

// Lanes are unsigned, so that wrap-around is defined. Means are made by integer_mean.h.
template <typename T>
struct IntegerMath {
  using Lane = typename UnsignedOf<T>::Type;
  using Lanes = Vector<Lane>;
  using Signed = Vector<T>;  // as the type itself orders them

  static Lanes add(Lanes a, Lanes b) { return a + b; }
  static Lanes multiply(Lanes a, Lanes b) { return a * b; }
  static Lanes minimum(Lanes a, Lanes b) { return (Signed)a < (Signed)b ? a : b; }
  static Lanes maximum(Lanes a, Lanes b) { return (Signed)a > (Signed)b ? a : b; }
};

// Works on bytes of 0 and 1, as Bools loads them. They have no mean: the operation is refused before it gets here.
struct BoolMath {
  using Lane = std::uint8_t;
  using Lanes = Vector<std::uint8_t>;
  static Lanes add(Lanes a, Lanes b) { return a | b; }
  static Lanes multiply(Lanes a, Lanes b) { return a & b; }
  static Lanes minimum(Lanes a, Lanes b) { return a & b; }
  static Lanes maximum(Lanes a, Lanes b) { return a | b; }
};

}  // namespace
}  // namespace bps::server
