// SPDX-License-Identifier: Apache-2.0
// Simulates jobs, and says which seeds break something.
//   bps_sim 1 10000          these seeds: what each breaks, with the faults that it takes, and a sum
//   bps_sim --first 1 10000  up to the first one that breaks something
//   bps_sim --show 17        all that happens with this seed, without the faults that it does not take
//   bps_sim --actions rounds 1 100   of each seed, what a job of the model does: rounds, failover or scheduler
// Exits with 1 when something was broken.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/log.h"
#include "model_failover.h"
#include "model_rounds.h"
#include "model_scheduler.h"
#include "simulation.h"

namespace {

using bps::sim::Outcome;
using bps::sim::Simulation;

constexpr std::uint64_t kMostReports = 5;

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

std::uint64_t number(const char* text) {
  return std::strtoull(text, nullptr, 10);
}

// One line for each seed.
int record(const std::string& model, std::uint64_t first, std::uint64_t last) {
  const auto job = model == "rounds"     ? bps::sim::record_rounds
                   : model == "failover" ? bps::sim::record_failover
                                         : bps::sim::record_scheduler;
  for (std::uint64_t seed = first; seed <= last; ++seed) {
    for (const std::uint32_t action : job(seed)) std::printf("%u ", action);
    std::printf("\n");
  }
  return 0;
}

// `stops`: at the first seed that breaks something.
int run(std::uint64_t first, std::uint64_t last, bool stops) {
  std::uint64_t broken = 0;
  std::uint64_t events = 0;
  std::uint64_t views = 0;
  std::uint64_t steps = 0;
  std::uint64_t resumed = 0;
  std::uint64_t gifts = 0;
  std::uint64_t shifts = 0;
  std::uint64_t moved = 0;
  for (std::uint64_t seed = first; seed <= last && !(stops && broken > 0); ++seed) {
    const Outcome outcome = Simulation(seed, false).run();
    events += outcome.events;
    views += outcome.views;
    steps += outcome.steps;
    resumed += outcome.resumed;
    gifts += outcome.gifts;
    shifts += outcome.shifts;
    moved += outcome.moved;
    if (outcome.violation.empty()) {
      // Everything follows from the seed: now and then, look.
      if (seed % 50 != 0 || Simulation(seed, false).run().hash == outcome.hash) continue;
      std::printf("seed %llu: it does not happen twice in the same way\n", static_cast<unsigned long long>(seed));
    } else if (broken < kMostReports) {
      report(seed);
    }
    ++broken;
  }
  std::printf(
      "%llu seeds: %llu views, %llu committed steps, %llu calls resumed, %llu parts given, %llu shifts that moved %llu "
      "partitions, %llu events; %llu broken\n",
      static_cast<unsigned long long>(last - first + 1), static_cast<unsigned long long>(views),
      static_cast<unsigned long long>(steps), static_cast<unsigned long long>(resumed),
      static_cast<unsigned long long>(gifts), static_cast<unsigned long long>(shifts),
      static_cast<unsigned long long>(moved), static_cast<unsigned long long>(events),
      static_cast<unsigned long long>(broken));
  constexpr std::uint64_t kMany = 500;  // seeds
  if (last - first + 1 >= kMany && broken == 0 && moved == 0) {
    std::printf("no server has got another weight: this simulator shows nothing of that\n");
    return 1;
  }
  return broken == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const bool shows = argc == 3 && std::strcmp(argv[1], "--show") == 0;
  bps::set_log(shows ? bps::LogLevel::kInfo : bps::LogLevel::kError, "sim");
  if (shows) return show(number(argv[2]));
  if (argc == 5 && std::strcmp(argv[1], "--actions") == 0) {
    return record(argv[2], number(argv[3]), number(argv[4]));
  }
  const bool stops = argc == 4 && std::strcmp(argv[1], "--first") == 0;
  if (argc != 3 && !stops) {
    std::fprintf(stderr, "usage: bps_sim [--first] FROM TO, bps_sim --show SEED, or bps_sim --actions MODEL FROM TO\n");
    return 2;
  }
  return run(number(argv[argc - 2]), number(argv[argc - 1]), stops);
}
