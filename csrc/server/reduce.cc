// SPDX-License-Identifier: Apache-2.0
#include "server/reduce.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "server/integer_mean.h"
#include "server/reduce_isa.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace bps::server {
namespace {

struct Isa {
  std::string_view name;
  isa::Kernel (*kernel)(Dtype, ReduceOp);
  isa::ExactKernel (*exact)(Dtype, bool);
};

#if defined(__x86_64__)
struct Feature {
  std::string_view name;  // the name in the compiler's -m flags
  bool (*present)();
};
constexpr Feature kFeatures[] = {
    {"avx2", [] { return __builtin_cpu_supports("avx2") != 0; }},
    {"fma", [] { return __builtin_cpu_supports("fma") != 0; }},
    // Some compilers' __builtin_cpu_supports does not know this one.
    {"f16c",
     [] {
       unsigned a = 0, b = 0, c = 0, d = 0;
       return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
     }},
    {"avx512f", [] { return __builtin_cpu_supports("avx512f") != 0; }},
    {"avx512bw", [] { return __builtin_cpu_supports("avx512bw") != 0; }},
    {"avx512dq", [] { return __builtin_cpu_supports("avx512dq") != 0; }},
    {"avx512vl", [] { return __builtin_cpu_supports("avx512vl") != 0; }},
};

// Returns true when `check` holds for each of the features in `list`, which are separated by spaces.
constexpr bool for_all(std::string_view list, auto&& check) {
  while (!list.empty()) {
    const std::string_view name = list.substr(0, list.find(' '));
    list.remove_prefix(std::min(name.size() + 1, list.size()));
    const auto* found = std::ranges::find(kFeatures, name, &Feature::name);
    if (found == std::end(kFeatures) || !check(*found)) return false;
  }
  return true;
}
// cmake/Isa.cmake compiles the files of the instruction sets with the flags that these lists name.
constexpr auto kKnown = [](const Feature&) { return true; };
static_assert(for_all(BPS_AVX2, kKnown) && for_all(BPS_AVX512, kKnown),
              "a file is compiled for more than is asked for");

bool has(std::string_view list) {
  return for_all(list, [](const Feature& feature) { return feature.present(); });
}
#endif

// Holds the instruction sets that this machine has, the best first.
struct Available {
  Available() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has(BPS_AVX512)) add("avx512", isa::avx512, isa::exact_avx512);
    if (has(BPS_AVX2)) add("avx2", isa::avx2, isa::exact_avx2);
#elif defined(__aarch64__)
    add("neon", isa::neon, isa::exact_neon);
#endif
    add("baseline", isa::baseline, isa::exact_baseline);
  }
  void add(std::string_view name, isa::Kernel (*kernel)(Dtype, ReduceOp), isa::ExactKernel (*exact)(Dtype, bool)) {
    isas[count] = {name, kernel, exact};
    names[count++] = name;
  }

  std::array<Isa, 3> isas;
  std::array<std::string_view, 3> names;
  std::size_t count = 0;
};

const Available& available() {
  static const Available found;
  return found;
}

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{available().isas.data()};
  return isa;
}

// Copies piece by piece, so that what was read is still in the cache for every destination but the first.
void copy(const std::byte* source, std::span<std::byte* const> destinations, std::size_t bytes) {
  constexpr std::size_t kPiece = std::size_t{128} << 10;  // fits well into any second-level cache
  const std::size_t piece = destinations.size() > 1 ? kPiece : bytes;
  for (std::size_t offset = 0; offset < bytes; offset += piece) {
    for (std::byte* destination : destinations) {
      if (destination != source) std::memcpy(destination + offset, source + offset, std::min(piece, bytes - offset));
    }
  }
}

}  // namespace

void reduce(const Reduction& what, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
            std::size_t count) {
  if (sources.empty() || destinations.empty() || count == 0) return;
  const std::size_t bytes = count * size_of(what.dtype);
  const ReduceOp op = what.op == ReduceOp::kAverage && what.divisor == 1 ? ReduceOp::kSum : what.op;
  if (sources.size() == 1 && op != ReduceOp::kAverage) return copy(sources[0], destinations, bytes);
  if (op == ReduceOp::kAverage && is_integer(what.dtype)) {
    return average_integers(what.dtype, sources, destinations, count, what.divisor);
  }
  const isa::Kernel kernel = chosen().load(std::memory_order_relaxed)->kernel(what.dtype, op);
  if (kernel == nullptr) return;
  kernel({sources.data(), sources.size(), destinations.data(), destinations.size(), bytes,
          std::max(what.divisor, std::uint32_t{1})});
}

void run_exactly(Dtype dtype, bool unrounded_result, const isa::ExactJob& job) {
  if (job.source_count == 0 || job.destination_count == 0) return;
  const isa::ExactKernel kernel = chosen().load(std::memory_order_relaxed)->exact(dtype, unrounded_result);
  if (kernel != nullptr) kernel(job);
}

std::string_view reduce_isa() {
  return chosen().load(std::memory_order_relaxed)->name;
}

bool set_reduce_isa(std::string_view isa) {
  const Available& found = available();
  for (std::size_t i = 0; i < found.count; ++i) {
    if (found.isas[i].name != isa) continue;
    chosen().store(&found.isas[i], std::memory_order_relaxed);
    return true;
  }
  return false;
}

std::span<const std::string_view> available_reduce_isas() {
  return std::span(available().names).first(available().count);
}

}  // namespace bps::server
