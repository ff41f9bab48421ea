// SPDX-License-Identifier: Apache-2.0
#include "server/sum_rate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/threads.h"
#include "server/reduce.h"

namespace bps::server {
namespace {

constexpr std::size_t kFloats = std::size_t{512} << 10;  // of a source: two of them do not fit into a core's own caches
constexpr std::size_t kSlice = std::size_t{64} << 10;    // is so short that other programs interrupt few
constexpr int kPasses = 3;

// Counts the fastest slice, because other programs only ever make it slower. The memory is warm: it was just filled.
double rate_of_loop() {
  std::vector<float> first(kFloats);
  const std::vector<float> second(kFloats);
  std::uint64_t least_ns = ~std::uint64_t{0};
  for (int pass = 0; pass < kPasses; ++pass) {
    for (std::size_t at = 0; at < kFloats; at += kSlice) {
      const std::span sum(first.data() + at, kSlice);
      const std::span pushed(second.data() + at, kSlice);
      const std::array sources{std::as_bytes(sum).data(), std::as_bytes(pushed).data()};
      const std::array destinations{std::as_writable_bytes(sum).data()};
      const std::uint64_t begin = now_ns();
      reduce({Dtype::kFloat32, ReduceOp::kSum, 1}, sources, destinations, kSlice);
      least_ns = std::min(least_ns, now_ns() - begin);
    }
  }
  return 2.0 * kSlice * sizeof(float) * 1e9 / static_cast<double>(std::max<std::uint64_t>(least_ns, 1));
}

struct Threads {
  ~Threads() {
    for (std::thread& one : all) one.join();
  }
  std::vector<std::thread> all;
};

}  // namespace

double measure_sum_rate(std::size_t loops) {
  const std::size_t cores = std::max(std::thread::hardware_concurrency(), 1U);
  std::vector<double> rates(std::clamp<std::size_t>(loops, 1, cores));
  {
    Threads others;
    for (std::size_t i = 1; i < rates.size(); ++i) {
      others.all.push_back(start_thread([&rate = rates[i]] { rate = rate_of_loop(); }));
    }
    rates.front() = rate_of_loop();
  }
  return std::accumulate(rates.begin(), rates.end(), 0.0);
}

std::uint64_t coarse_rate(double rate) {
  return static_cast<std::uint64_t>(std::exp2(std::round(std::log2(std::max(rate, 1.0)) * 2) / 2));
}

}  // namespace bps::server
