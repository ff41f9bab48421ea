// SPDX-License-Identifier: Apache-2.0
// What exact sums cost beside plain ones, on one core: one JSON line per instruction set, element type, operation,
// number of ranks and size.
//
// Plain and exact passes over the same arrays take turns. plain_gbps and exact_gbps count all bytes read and written,
// of the best round; memcpy_gbps is the traffic of a memcpy of the same size; ratio holds the quartiles of the rounds'
// ratios, and best that of the best times, which what else runs on the machine disturbs least. repaired is how many
// elements took the slow way. There is one destination, apart from the sources: with more of them the ratio can only be
// lower.
//
// Gradients are normal with a deviation of 1e-3, rounded to the type; those of "float64 long" to float64, those of
// "float64" to float32 first, so that their sums fit.
//
//   exact_bench [isa [dtype]]      e.g. exact_bench avx512 bfloat16
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "passes.h"
#include "server/exact_sum.h"
#include "server/reduce.h"
#include "server/reduce_isa.h"

namespace {

using bps::Dtype;
using bps::ReduceOp;

struct Numbers {
  std::string_view name;
  Dtype dtype;
  bool is_long;
};
constexpr Numbers kNumbers[] = {{"float32", Dtype::kFloat32, false},
                                {"float16", Dtype::kFloat16, false},
                                {"bfloat16", Dtype::kBfloat16, false},
                                {"float64", Dtype::kFloat64, false},
                                {"float64 long", Dtype::kFloat64, true}};
constexpr std::size_t kSizes[] = {std::size_t{64} << 10, std::size_t{1} << 20, std::size_t{16} << 20};
constexpr int kRounds = 41;

void fill(const Numbers& numbers, std::byte* into, std::size_t bytes, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, 1e-3);
  std::vector<double> values(bytes / bps::size_of(numbers.dtype));
  for (double& value : values) value = numbers.is_long ? normal(random) : static_cast<float>(normal(random));
  // The kernels themselves convert it: one unrounded source, rounded once.
  constexpr bool kUnrounded = true;
  const auto* from = reinterpret_cast<const std::byte*>(values.data());
  const auto nothing = [](void*, std::size_t) { return 0.0; };
  bps::server::run_exactly(numbers.dtype, false, {&from, &kUnrounded, 1, &into, 1, values.size(), 1, nothing, nullptr});
}

void measure(std::string_view isa, const Numbers& numbers, ReduceOp op, std::size_t ranks, std::size_t bytes) {
  const Buffers buffers(ranks + 2, bytes);
  for (std::size_t i = 0; i < ranks; ++i) {
    fill(numbers, buffers.pointers[i], bytes, static_cast<std::uint32_t>(i));
  }
  const std::vector<const std::byte*> sources(buffers.pointers.begin(), buffers.pointers.end() - 2);
  const std::array into{buffers.pointers[ranks]};
  const std::size_t count = bytes / bps::size_of(numbers.dtype);
  const auto divisor = static_cast<std::uint32_t>(ranks);
  const bool averages = op == ReduceOp::kAverage;
  const auto plain = [&] { bps::server::reduce({numbers.dtype, op, divisor}, sources, into, count); };
  bps::server::ExactSum sum;
  sum.begin({numbers.dtype, averages ? ReduceOp::kExactAverage : ReduceOp::kExactSum, divisor});
  for (std::size_t i = 0; i < ranks; ++i) sum.add_plain();
  std::vector<const std::byte*> scratch;
  const auto exact = [&] {
    scratch = sources;
    sum.sum(0, count, scratch, into);
  };
  const auto copy = [&] { std::memcpy(buffers.pointers[ranks], buffers.pointers[ranks + 1], bytes); };

  const std::size_t streams = ranks + 1;
  const std::size_t repeats = std::max<std::size_t>(1, (std::size_t{4} << 20) / (bytes * streams));
  std::vector<double> ratios;
  double best[3] = {1e9, 1e9, 1e9};
  const int rounds = numbers.is_long ? kRounds / 4 : kRounds;
  for (int round = -1; round < rounds; ++round) {
    double of[3];
    for (int turn = 0; turn < 2; ++turn) {
      const bool is_exact = (turn + round) % 2 == 0;
      of[is_exact] = is_exact ? seconds(repeats, exact) : seconds(repeats, plain);
    }
    of[2] = seconds(repeats, copy);
    if (round < 0) continue;  // not counted: caches and pages are cold
    for (int i = 0; i < 3; ++i) best[i] = std::min(best[i], of[i]);
    ratios.push_back(of[1] / of[0]);
  }
  std::sort(ratios.begin(), ratios.end());
  std::size_t repaired = 0;
  const std::vector<std::uint8_t> none(ranks);
  const auto repair = [](void* found, std::size_t) {
    ++*static_cast<std::size_t*>(found);
    return 0.0;
  };
  bps::server::run_exactly(numbers.dtype, false,
                           {sources.data(), reinterpret_cast<const bool*>(none.data()), ranks, into.data(), 1, count,
                            averages ? divisor : 1, repair, &repaired});
  const double traffic = static_cast<double>(streams * bytes) * 1e-9;
  std::printf(
      "{\"isa\": \"%.*s\", \"dtype\": \"%.*s\", \"op\": \"%s\", \"ranks\": %zu, \"bytes\": %zu, \"plain_gbps\": %.1f, "
      "\"exact_gbps\": %.1f, \"memcpy_gbps\": %.1f, \"best\": %.2f, \"ratio\": [%.2f, %.2f, %.2f], \"repaired\": "
      "%zu}\n",
      static_cast<int>(isa.size()), isa.data(), static_cast<int>(numbers.name.size()), numbers.name.data(),
      averages ? "average" : "sum", ranks, bytes, traffic / best[0], traffic / best[1],
      2 * static_cast<double>(bytes) * 1e-9 / best[2], best[1] / best[0], ratios[ratios.size() / 4],
      ratios[ratios.size() / 2], ratios[ratios.size() * 3 / 4], repaired);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  for (const std::string_view isa : bps::server::available_reduce_isas()) {
    if (argc > 1 && isa != argv[1]) continue;
    bps::server::set_reduce_isa(isa);
    for (const Numbers& numbers : kNumbers) {
      if (argc > 2 && numbers.name != argv[2]) continue;
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        for (const std::size_t ranks : {2, 3, 4, 8}) {
          for (const std::size_t bytes : kSizes) {
            if (bytes * ranks <= std::size_t{64} << 20) measure(isa, numbers, op, ranks, bytes);
          }
        }
      }
    }
  }
  return 0;
}
