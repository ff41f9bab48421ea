// SPDX-License-Identifier: Apache-2.0
// Makes the one pass of the reducer, for every element type. It is only for reduce_<isa>.cc; see reduce_math.h for the
// rules.
//
// An element type is a Math plus how it lies in memory: load() and store() move kUnitBytes between memory and kParts
// vectors of accumulators.
#pragma once

#include "server/reduce_math.h"

namespace bps::server {
namespace {

template <typename Math>
struct Plain : Math {
  using typename Math::Lanes;
  static constexpr std::size_t kParts = 1;
  static constexpr std::size_t kUnitBytes = kVectorBytes;

  static void load(const std::byte* from, Lanes* to) { *to = load_vector<typename Math::Lane>(from); }
  static void store(std::byte* to, const Lanes* from) { store_vector<typename Math::Lane>(to, *from); }
};

// Takes each byte but 0 for true, as numpy and torch do: views of other dtypes hold such bytes.
struct Bools : Plain<BoolMath> {
  static void load(const std::byte* from, Lanes* to) { *to = (Lanes)(load_vector<Lane>(from) != 0) & 1; }
};

// Loads 16-bit floats that share 32-bit words. Even elements become one vector of float32 and odd ones another, which
// takes masks and shifts only, no shuffle. Half names the conversions: widen() heeds only the low 16 bits of a word,
// and narrow() leaves the high 16 zero.
template <typename Half>
struct Paired : FloatMath<float> {
  static constexpr std::size_t kParts = 2;
  static constexpr std::size_t kUnitBytes = kVectorBytes;

  static void load(const std::byte* from, Floats* to) {
    const auto words = load_vector<std::uint32_t>(from);
    to[0] = Half::widen(words);
    to[1] = Half::widen(words >> 16);
  }
  static void store(std::byte* to, const Floats* from) {
    store_vector<std::uint32_t>(to, Half::narrow(from[0]) | (Half::narrow(from[1]) << 16));
  }
};

// This does not use AVX-512's vcvtneps2bf16, which takes subnormals for zero, because results must not depend on the
// machine.
struct Bfloat16Bits {
  static Floats widen(Words half) { return (Floats)(half << 16); }
  // Rounds to nearest even, and carries run into the exponent. NaN needs no care: arithmetic yields the quieted NaN of
  // an operand, here a widened half, or the default NaN; both have 16 zeros at the end, so nothing is carried.
  static Words narrow(Floats value) {
    const Words bits = (Words)value;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
};

// Converts float16 on machines without an instruction for it. A subnormal half is a multiple of 2^-24, the last place
// of a float32 in [0.5, 1): adding 0.5 rounds to it, subtracting 0.5 leaves its value.
struct Float16Bits {
  static Floats widen(Words half) {
    const Words magnitude = half & 0x7fff;
    const Words normal = (magnitude << 13) + 0x38000000;  // the exponent's bias, 15, becomes 127
    const Words infinite = (magnitude << 13) | 0x7f800000;
    const Words tiny = (Words)((Floats)(magnitude | 0x3f000000) - 0.5F);
    const Words bits = magnitude < 0x400 ? tiny : magnitude < 0x7c00 ? normal : infinite;
    return (Floats)(bits | ((half & 0x8000) << 16));
  }
  static Words narrow(Floats value) {
    const Words bits = (Words)value;
    const Words magnitude = bits & 0x7fffffff;
    const Words normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Words tiny = (Words)((Floats)magnitude + 0.5F) - 0x3f000000;
    const Words finite = magnitude < 0x38800000 ? tiny : normal;
    const Words large = value != value ? Words{} + 0x7e00 : Words{} + 0x7c00;
    return (magnitude < 0x477ff000 ? finite : large) | ((bits >> 16) & 0x8000);  // 65520 and more round to infinity
  }
};

template <typename Element, ReduceOp kOp>
typename Element::Lanes combine(typename Element::Lanes a, typename Element::Lanes b) {
  if constexpr (kOp == ReduceOp::kMin) return Element::minimum(a, b);
  if constexpr (kOp == ReduceOp::kMax) return Element::maximum(a, b);
  if constexpr (kOp == ReduceOp::kProduct) return Element::multiply(a, b);
  return Element::add(a, b);
}

// step() touches memory by one of these: whole units, or the last, incomplete unit by way of a copy padded with zeros.
template <typename Element>
struct Whole {
  static void load(const std::byte* from, typename Element::Lanes* to) { Element::load(from, to); }
  static void store(std::byte* to, const typename Element::Lanes* from) { Element::store(to, from); }
};
template <typename Element>
struct Rest {
  void load(const std::byte* from, typename Element::Lanes* to) const {
    std::byte unit[Element::kUnitBytes] = {};
    __builtin_memcpy(unit, from, bytes);
    Element::load(unit, to);
  }
  void store(std::byte* to, const typename Element::Lanes* from) const {
    std::byte unit[Element::kUnitBytes];
    Element::store(unit, from);
    __builtin_memcpy(to, unit, bytes);
  }
  std::size_t bytes;
};

template <typename Element>
concept HasMean = requires { typename Element::Divisor; };

// Stands for the divisor in reductions that divide nothing.
struct NoDivisor {
  explicit NoDivisor(std::uint32_t /*by*/) {}
};
template <typename Element>
struct DivisorOf {
  using Type = NoDivisor;
};
template <HasMean Element>
struct DivisorOf<Element> {
  using Type = typename Element::Divisor;
};

// Reduces a run of kUnits units at `offset`. All is read before anything is written, so in place is safe.
template <typename Element, ReduceOp kOp, std::size_t kUnits, typename Memory>
[[gnu::always_inline]] inline void step(const isa::Job& job, std::size_t offset,
                                        const typename DivisorOf<Element>::Type& divisor, Memory memory) {
  constexpr std::size_t kParts = Element::kParts;
  typename Element::Lanes sum[kUnits * kParts];
  const std::byte* source = job.sources[0] + offset;
#pragma GCC unroll 8
  for (std::size_t u = 0; u < kUnits; ++u) memory.load(source + u * Element::kUnitBytes, sum + u * kParts);
  for (std::size_t s = 1; s < job.source_count; ++s) {
    source = job.sources[s] + offset;
#pragma GCC unroll 8
    for (std::size_t u = 0; u < kUnits; ++u) {
      typename Element::Lanes next[kParts];
      memory.load(source + u * Element::kUnitBytes, next);
#pragma GCC unroll 8
      for (std::size_t p = 0; p < kParts; ++p) {
        sum[u * kParts + p] = combine<Element, kOp>(sum[u * kParts + p], next[p]);
      }
    }
  }
  if constexpr (kOp == ReduceOp::kAverage) {
    for (auto& worker_loops : sum) worker_loops = Element::divide(worker_loops, divisor);
  }
  for (std::size_t d = 0; d < job.destination_count; ++d) {
    std::byte* destination = job.destinations[d] + offset;
#pragma GCC unroll 8
    for (std::size_t u = 0; u < kUnits; ++u) memory.store(destination + u * Element::kUnitBytes, sum + u * kParts);
  }
}

template <typename Element, ReduceOp kOp>
void run(const isa::Job& job) {
  constexpr std::size_t kUnit = Element::kUnitBytes;
  constexpr std::size_t kUnits = 4 / Element::kParts;  // four accumulators hide the latency of an addition
  const typename DivisorOf<Element>::Type divisor(job.divisor);
  std::size_t offset = 0;
  for (; offset + kUnits * kUnit <= job.bytes; offset += kUnits * kUnit) {
    step<Element, kOp, kUnits>(job, offset, divisor, Whole<Element>{});
  }
  for (; offset + kUnit <= job.bytes; offset += kUnit) step<Element, kOp, 1>(job, offset, divisor, Whole<Element>{});
  if (offset < job.bytes) step<Element, kOp, 1>(job, offset, divisor, Rest<Element>{job.bytes - offset});
}

template <typename Element>
isa::Kernel choose(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return run<Element, ReduceOp::kSum>;
    case ReduceOp::kAverage:
      if constexpr (HasMean<Element>) return run<Element, ReduceOp::kAverage>;
      break;
    case ReduceOp::kMin: return run<Element, ReduceOp::kMin>;
    case ReduceOp::kMax: return run<Element, ReduceOp::kMax>;
    case ReduceOp::kProduct: return run<Element, ReduceOp::kProduct>;
    case ReduceOp::kExactSum:
    case ReduceOp::kExactAverage:
    case ReduceOp::kExactSumToOdd: break;  // exact_kernels.h
  }
  return nullptr;
}

template <typename Float16>
isa::Kernel choose(Dtype dtype, ReduceOp op) {
  switch (dtype) {
    case Dtype::kFloat32: return choose<Plain<FloatMath<float>>>(op);
    case Dtype::kFloat64: return choose<Plain<FloatMath<double>>>(op);
    case Dtype::kFloat16: return choose<Float16>(op);
    case Dtype::kBfloat16: return choose<Paired<Bfloat16Bits>>(op);
    case Dtype::kUint8: return choose<Plain<IntegerMath<std::uint8_t>>>(op);
    case Dtype::kInt8: return choose<Plain<IntegerMath<std::int8_t>>>(op);
    case Dtype::kInt32: return choose<Plain<IntegerMath<std::int32_t>>>(op);
    case Dtype::kInt64: return choose<Plain<IntegerMath<std::int64_t>>>(op);
    case Dtype::kBool: return choose<Bools>(op);
  }
  return nullptr;
}

}  // namespace
}  // namespace bps::server
