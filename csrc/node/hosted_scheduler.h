// SPDX-License-Identifier: Apache-2.0
// Starts the scheduler of an embedded job, in the process of rank 0.
#pragma once

#include <memory>

#include "node/job_secret.h"
#include "node/startup.h"
#include "van/scheduler.h"

namespace bps::node {

// Returns null when a rival has held the ports and is gone by now. Throws kMismatch when another process with rank 0 of
// this job runs on this host, and kPortTaken.
std::unique_ptr<van::Scheduler> host_scheduler(const ProcessOptions& process, const JobSecret& secret);

}  // namespace bps::node
