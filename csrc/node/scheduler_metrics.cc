// SPDX-License-Identifier: Apache-2.0
#include "node/scheduler_metrics.h"

#include <exception>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "node/system_metrics.h"

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

std::unique_ptr<MetricsServer> serve(const MetricsSettings& settings, std::uint32_t port,
                                     std::function<std::string()> text) {
  try {
    if (port > std::numeric_limits<std::uint16_t>::max()) {
      throw Error(ErrorCode::kInvalidArgument, "there is no port " + std::to_string(port),
                  "set BPS_METRICS_PORT lower");
    }
    const std::string host = settings.host == "*" ? "" : settings.host;
    auto server = std::make_unique<MetricsServer>(host, static_cast<std::uint16_t>(port), std::move(text));
    log_info("metrics are served at port " + std::to_string(port));
    return server;
  } catch (const Error& error) {
    log_warning(std::string("no metrics are served: ") + error.what() + " (" + error.hint() + ")");
  }
  return nullptr;
}

std::unique_ptr<MetricsServer> serve_scheduler(const MetricsSettings& settings, const van::Scheduler& scheduler) {
  if (!settings.port) return nullptr;
  return serve(settings, *settings.port, [&scheduler] {
    MetricFamilies families = scheduler_families(scheduler);
    MetricFamilies process = process_families();
    families.insert(families.end(), process.begin(), process.end());
    return to_text(families);
  });
}

}  // namespace bps::node
