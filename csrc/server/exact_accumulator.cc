// SPDX-License-Identifier: Apache-2.0
#include "server/exact_accumulator.h"

#include <algorithm>
#include <cmath>

#include "server/reduce.h"
#include "server/reduce_isa.h"

namespace bps::server {
namespace {

// Divides numbers in float64, and rounds them once more.
void narrow(Dtype dtype, const double* from, std::size_t count, std::uint32_t divisor, std::byte* into) {
  constexpr bool kUnrounded = true;
  const std::byte* source = reinterpret_cast<const std::byte*>(from);
  run_exactly(dtype, false, {&source, &kUnrounded, 1, &into, 1, count, divisor, nothing_to_repair, nullptr});
}

}  // namespace

ExactAccumulator::ExactAccumulator(Dtype dtype, std::size_t elements) : dtype_(dtype), sums_(elements, -0.0) {}

void ExactAccumulator::clear() {
  std::ranges::fill(sums_, -0.0);
  beyond_.clear();
}

void ExactAccumulator::add(const std::byte* elements) {
  constexpr bool kUnrounded[] = {true, false};
  adding_ = elements;
  std::byte* const sums = reinterpret_cast<std::byte*>(sums_.data());
  const std::byte* const sources[] = {sums, elements};
  run_exactly(dtype_, true,
              {sources, kUnrounded, 2, &sums, 1, sums_.size(), 1,
               [](void* self, std::size_t index) { return static_cast<ExactAccumulator*>(self)->keep(index); }, this});
}

// Finds the sum before, and what is added, where they were: results are written when an element is complete.
double ExactAccumulator::keep(std::size_t index) {
  constexpr bool kPlain = false;
  const std::byte* from = adding_ + index * size_of(dtype_);
  double added = 0;
  std::byte* into = reinterpret_cast<std::byte*>(&added);
  run_exactly(dtype_, true, {&from, &kPlain, 1, &into, 1, 1, 1, nothing_to_repair, nullptr});
  const auto element = static_cast<std::uint32_t>(index);
  const auto found = beyond_.find(element);
  const bool is_beyond = found != beyond_.end();
  // A number that is not finite decides the sum, whatever else is in it. A float64 holds that.
  if (!std::isfinite(added) || (!is_beyond && !std::isfinite(sums_[index]))) {
    if (is_beyond) beyond_.erase(found);
    const double sum = is_beyond ? added : sums_[index] + added;
    return std::isnan(sum) ? kNaN : sum;
  }
  Superaccumulator& sum = is_beyond ? found->second : beyond_[element];
  if (!is_beyond) sum.add(sums_[index]);
  sum.add(added);
  return kNaN;
}

std::vector<std::uint32_t> ExactAccumulator::beyond() const {
  std::vector<std::uint32_t> found;
  found.reserve(beyond_.size());
  for (const auto& [element, sum] : beyond_) found.push_back(element);
  return found;
}

void ExactAccumulator::specials(std::span<const std::uint32_t> elements, std::span<bool> into) const {
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const double sum = sums_[elements[i]];
    into[3 * i] = std::isnan(sum) && !beyond_.contains(elements[i]);
    into[3 * i + 1] = std::isinf(sum) && sum > 0;
    into[3 * i + 2] = std::isinf(sum) && sum < 0;
  }
}

std::vector<double> ExactAccumulator::parts(std::span<const std::uint32_t> elements) const {
  std::vector<double> parts(elements.size() * Superaccumulator::kParts);
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const auto into = std::span(parts).subspan(i * Superaccumulator::kParts).first<Superaccumulator::kParts>();
    const auto found = beyond_.find(elements[i]);
    if (found != beyond_.end()) {
      found->second.to_parts(into);
      continue;
    }
    Superaccumulator sum;
    sum.add(sums_[elements[i]]);
    sum.to_parts(into);
  }
  return parts;
}

void ExactAccumulator::round(std::span<const double> sums, std::span<const std::uint32_t> elements,
                             std::span<const double> parts, std::uint32_t divisor, bool is_divided,
                             std::byte* into) const {
  const std::size_t size = size_of(dtype_);
  narrow(dtype_, sums.data(), sums.size(), is_divided ? 1 : divisor, into);
  const bool again = dtype_ != Dtype::kFloat64;
  for (std::size_t i = 0; i < elements.size(); ++i) {
    Superaccumulator sum;
    sum.add_parts(parts.subspan(i * Superaccumulator::kParts).first<Superaccumulator::kParts>());
    const double value =
        sum.value(divisor, again ? Superaccumulator::Rounding::kToOdd : Superaccumulator::Rounding::kNearest);
    narrow(dtype_, &value, 1, 1, into + elements[i] * size);
  }
}

}  // namespace bps::server
