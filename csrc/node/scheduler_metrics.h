// SPDX-License-Identifier: Apache-2.0
// Prometheus is told this of a scheduler. Threading: any thread.
#pragma once

#include "core/exposition.h"
#include "van/scheduler.h"

namespace bps::node {

MetricFamilies scheduler_families(const van::Scheduler& scheduler);

}  // namespace bps::node
