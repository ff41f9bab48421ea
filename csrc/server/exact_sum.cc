// SPDX-License-Identifier: Apache-2.0
#include "server/exact_sum.h"

#include "server/reduce_isa.h"
#include "server/superaccumulator.h"

namespace bps::server {
namespace {

// Returns one element, whatever its type. A NaN stays one.
double value_of(Dtype dtype, const std::byte* element) {
  constexpr bool kPlain = false;
  double value = 0;
  std::byte* const into = reinterpret_cast<std::byte*>(&value);
  run_exactly(dtype, true, {&element, &kPlain, 1, &into, 1, 1, 1, nothing_to_repair, nullptr});
  return value;
}

}  // namespace

void ExactSum::begin(const Reduction& what, tensor::UnroundedWriter* unrounded) {
  what_ = what;
  writer_ = unrounded;
  readers_.clear();
  is_unrounded_.clear();
}

void ExactSum::sum(std::size_t first, std::size_t count, std::span<const std::byte*> sources,
                   std::span<std::byte* const> destinations) {
  first_ = first;
  sources_ = sources;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (is_unrounded_[i] != 0) sources[i] = readers_[i].sums() + first * sizeof(double);
  }
  static_assert(sizeof(bool) == sizeof(std::uint8_t));
  const std::uint32_t divisor = what_.op == ReduceOp::kExactAverage && writer_ == nullptr ? what_.divisor : 1;
  run_exactly(what_.dtype, writer_ != nullptr,
              {sources.data(), reinterpret_cast<const bool*>(is_unrounded_.data()), sources.size(), destinations.data(),
               destinations.size(), count, divisor,
               [](void* self, std::size_t index) { return static_cast<ExactSum*>(self)->repair(index); }, this,
               what_.op == ReduceOp::kExactSumToOdd});
}

double ExactSum::repair(std::size_t index) {
  Superaccumulator sum;
  const auto element = static_cast<std::uint32_t>(first_ + index);
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (is_unrounded_[i] == 0) {
      sum.add(value_of(what_.dtype, sources_[i] + index * size_of(what_.dtype)));
      continue;
    }
    const auto [terms, is_first_scaled] = readers_[i].terms(element);
    for (const double& term : terms) {
      is_first_scaled && &term == terms.data() ? sum.add_scaled(term) : sum.add(term);
    }
  }
  if (writer_ != nullptr) {
    double terms[Superaccumulator::kMostTerms];
    bool is_first_scaled = false;
    const std::size_t count = sum.expand(terms, is_first_scaled);
    if (count == 1 && !is_first_scaled) return terms[0];
    writer_->add(element, {terms, count}, is_first_scaled);
    return kNaN;
  }
  const bool again = what_.dtype != Dtype::kFloat64 || what_.op == ReduceOp::kExactSumToOdd;
  const std::uint32_t divisor = what_.op == ReduceOp::kExactAverage ? what_.divisor : 1;
  return sum.value(divisor, again ? Superaccumulator::Rounding::kToOdd : Superaccumulator::Rounding::kNearest);
}

}  // namespace bps::server
