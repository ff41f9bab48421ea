// SPDX-License-Identifier: Apache-2.0
#include "failover.h"

#include <algorithm>

namespace bps::sim {

std::uint32_t first_round(std::span<const Report> reports) {
  return std::ranges::min(reports, {}, &Report::next).next;
}

bool can_go_on(std::span<const Report> reports, std::uint32_t epoch) {
  const std::uint32_t since = reports.front().since;
  return since < epoch && std::ranges::all_of(reports, [&](const Report& report) { return report.since == since; });
}

Decision decide(std::span<const Report> reports, std::uint32_t round) {
  const bool have_all_begun = round < first_round(reports);
  std::uint32_t needed = 0;
  bool have_all_left_it = true;
  bool has_failed = false;
  bool is_late = false;
  for (const Report& report : reports) {
    has_failed |= std::ranges::count(report.failed, round + 1) > 0;
    if (report.interrupted == round + 1) {
      needed |= report.missing;
      is_late |= report.is_late != 0;
    } else {
      have_all_left_it = false;
    }
  }
  const bool have_all_results = have_all_begun && needed == 0;
  if (has_failed || (is_late && !have_all_results)) return {.fate = Decision::Fate::kFailed, .partitions = {}};
  if (!have_all_begun) return {.fate = Decision::Fate::kAgain, .partitions = {}};
  if (needed != 0 && !have_all_left_it) return {.fate = Decision::Fate::kAborted, .partitions = {}};
  Decision made{.fate = Decision::Fate::kRepeated, .partitions = {}};
  for (std::uint32_t i = 0; i < 32; ++i) {
    if ((needed >> i & 1) != 0) made.partitions.push_back(i);
  }
  return made;
}

}  // namespace bps::sim
