// SPDX-License-Identifier: Apache-2.0
#include "failover.h"

#include <algorithm>

namespace bps::sim {

std::uint32_t first_round(std::span<const Report> reports) {
  return std::ranges::min(reports, {}, &Report::next).next;
}

Decision decide(std::span<const Report> reports, std::uint32_t round) {
  if (round >= first_round(reports)) return {.fate = Decision::Fate::kAgain, .partitions = {}};
  std::uint32_t needed = 0;
  bool have_all_left_it = true;
  for (const Report& report : reports) {
    if (report.interrupted == round + 1) {
      needed |= report.missing;
    } else {
      have_all_left_it = false;
    }
  }
  if (needed != 0 && !have_all_left_it) return {.fate = Decision::Fate::kAborted, .partitions = {}};
  Decision made{.fate = Decision::Fate::kRepeated, .partitions = {}};
  for (std::uint32_t i = 0; i < 32; ++i) {
    if ((needed >> i & 1) != 0) made.partitions.push_back(i);
  }
  return made;
}

}  // namespace bps::sim
