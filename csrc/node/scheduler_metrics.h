// SPDX-License-Identifier: Apache-2.0
// Tells Prometheus of a scheduler, and makes a process of any role tell it. Threading: any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/exposition.h"
#include "core/settings.h"
#include "node/metrics_server.h"
#include "van/scheduler.h"

namespace bps::node {

MetricFamilies scheduler_families(const van::Scheduler& scheduler);
// Serves `text` at this port. Without a free port nothing is served, and the log says so.
std::unique_ptr<MetricsServer> serve(const MetricsSettings& settings, std::uint32_t port,
                                     std::function<std::string()> text);
// Serves a process that is the scheduler alone, if BPS_METRICS_PORT wants it.
std::unique_ptr<MetricsServer> serve_scheduler(const MetricsSettings& settings, const van::Scheduler& scheduler);

}  // namespace bps::node
