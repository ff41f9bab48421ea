// SPDX-License-Identifier: Apache-2.0
// Returns what Prometheus is told about a scheduler. Any thread may call it.
#pragma once

#include "core/exposition.h"
#include "van/scheduler.h"

namespace bps::node {

MetricFamilies scheduler_families(const van::Scheduler& scheduler);

}  // namespace bps::node
