// SPDX-License-Identifier: Apache-2.0
// Simulates jobs, and says which seeds break something.
//   bps_sim 1 10000        these seeds; a line for each that breaks something, and a sum
//   bps_sim --show 17      all that happens with this seed
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/log.h"
#include "simulation.h"

namespace {

using bps::sim::Outcome;
using bps::sim::Simulation;

// Leaves out each fault without which the seed still breaks something.
std::uint64_t shrink(std::uint64_t seed) {
  std::uint64_t keep = ~std::uint64_t{0};
  const std::size_t faults = Simulation(seed, false).faults().size();
  for (std::size_t i = 0; i < faults; ++i) {
    const std::uint64_t fewer = keep & ~(std::uint64_t{1} << i);
    if (!Simulation(seed, false, fewer).run().violation.empty()) keep = fewer;
  }
  return keep;
}

void report(std::uint64_t seed) {
  const std::uint64_t keep = shrink(seed);
  Simulation simulation(seed, false, keep);
  const std::string job = simulation.describe();
  std::printf("seed %llu: %s\n  %s\n", static_cast<unsigned long long>(seed), simulation.run().violation.c_str(),
              job.c_str());
  std::fflush(stdout);
}

int show(std::uint64_t seed) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const bool breaks = !Simulation(seed, false).run().violation.empty();
  Simulation simulation(seed, true, breaks ? shrink(seed) : ~std::uint64_t{0});
  std::printf("%s\n", simulation.describe().c_str());
  const Outcome outcome = simulation.run();
  std::printf("%u views, %u steps, %llu events, hash %016llx\n%s\n", outcome.views, outcome.steps,
              static_cast<unsigned long long>(outcome.events), static_cast<unsigned long long>(outcome.hash),
              outcome.violation.empty() ? "all is well" : outcome.violation.c_str());
  return outcome.violation.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  bps::set_log(bps::LogLevel::kError, "sim");
  if (argc == 3 && std::strcmp(argv[1], "--show") == 0) {
    bps::set_log(bps::LogLevel::kInfo, "sim");
    return show(std::strtoull(argv[2], nullptr, 10));
  }
  if (argc != 3) {
    std::fprintf(stderr, "usage: bps_sim FIRST LAST, or bps_sim --show SEED\n");
    return 2;
  }
  const std::uint64_t first = std::strtoull(argv[1], nullptr, 10);
  const std::uint64_t last = std::strtoull(argv[2], nullptr, 10);
  std::uint64_t broken = 0;
  std::uint64_t events = 0;
  std::uint64_t views = 0;
  std::uint64_t steps = 0;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    const Outcome outcome = Simulation(seed, false).run();
    events += outcome.events;
    views += outcome.views;
    steps += outcome.steps;
    if (outcome.violation.empty()) {
      // Everything follows from the seed: now and then, look.
      if (seed % 50 != 0 || Simulation(seed, false).run().hash == outcome.hash) continue;
      std::printf("seed %llu: it does not happen twice in the same way\n", static_cast<unsigned long long>(seed));
    } else if (broken < 5) {
      report(seed);
    }
    ++broken;
  }
  std::printf("%llu seeds: %llu views, %llu committed steps, %llu events; %llu broken\n",
              static_cast<unsigned long long>(last - first + 1), static_cast<unsigned long long>(views),
              static_cast<unsigned long long>(steps), static_cast<unsigned long long>(events),
              static_cast<unsigned long long>(broken));
  return broken == 0 ? 0 : 1;
}
