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

namespace {

std::optional<Decision::Gift> find_gift(std::span<const Report> reports, std::uint32_t partition) {
  std::uint32_t most = 0, least = ~std::uint32_t{0}, who = 0;
  for (std::uint32_t rank = 0; rank < reports.size(); ++rank) {
    const Report& report = reports[rank];
    if ((report.whole >> partition & 1) != 0) return Decision::Gift{partition, rank, std::nullopt};
    if ((report.missing >> partition & 1) == 0) continue;
    least = std::min(least, report.have[partition]);
    if (report.have[partition] <= most) continue;
    most = report.have[partition];
    who = rank;
  }
  if (least == most) return std::nullopt;
  return Decision::Gift{partition, who, most};
}

}  // namespace

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
  if (has_failed || (is_late && !have_all_results))
    return {.fate = Decision::Fate::kFailed, .partitions = {}, .gifts = {}};
  if (!have_all_begun) return {.fate = Decision::Fate::kAgain, .partitions = {}, .gifts = {}};
  if (needed != 0 && !have_all_left_it) return {.fate = Decision::Fate::kAborted, .partitions = {}, .gifts = {}};
  Decision made{.fate = Decision::Fate::kRepeated, .partitions = {}, .gifts = {}};
  for (std::uint32_t i = 0; i < kMostPartitions; ++i) {
    if ((needed >> i & 1) == 0) continue;
    const auto gift = find_gift(reports, i);
    if (gift) made.gifts.push_back(*gift);
    if (!gift || gift->bytes) made.partitions.push_back(i);
  }
  return made;
}

}  // namespace bps::sim
