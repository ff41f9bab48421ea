// SPDX-License-Identifier: Apache-2.0
#include "node/scheduler_metrics.h"

namespace bps::node {
namespace {

using Type = MetricFamily::Type;

void add(MetricFamilies& families, Type type, const char* name, const char* help, double value) {
  families.push_back({type, name, help});
  families.back().add(value);
}

}  // namespace

MetricFamilies scheduler_families(const van::Scheduler& scheduler) {
  const van::Scheduler::Counters now = scheduler.counters();
  const auto value = [](std::uint64_t number) { return static_cast<double>(number); };
  MetricFamilies all;
  add(all, Type::kGauge, "bps_scheduler_members", "Members that are connected to the scheduler.", value(now.members));
  add(all, Type::kGauge, "bps_scheduler_epoch", "Number of the view of the job, as the scheduler has it.",
      value(now.epoch));
  add(all, Type::kGauge, "bps_scheduler_heartbeat_age_seconds", "Time since the most silent member was heard.",
      value(now.silence_ms) / 1e3);
  add(all, Type::kCounter, "bps_scheduler_messages_total", "Messages that came from members.", value(now.messages));
  add(all, Type::kCounter, "bps_scheduler_declarations_total", "Tensors declared, by each rank.", value(now.declared));
  add(all, Type::kCounter, "bps_scheduler_barriers_total", "Barriers that all ranks have met at.", value(now.barriers));
  add(all, Type::kCounter, "bps_scheduler_lost_members_total", "Members that were lost.", value(now.lost));
  add(all, Type::kCounter, "bps_scheduler_refused_connections_total", "Connections and members that were refused.",
      value(now.refused));
  label_all(all, {{"role", "scheduler"}});
  return all;
}

}  // namespace bps::node
