// SPDX-License-Identifier: Apache-2.0
#include "node/hosted_scheduler.h"

#include <string>
#include <vector>

#include "van/find_scheduler.h"

namespace bps::node {

std::unique_ptr<van::Scheduler> host_scheduler(const ProcessOptions& process, const JobSecret& secret) {
  const Startup& startup = process.startup;
  van::SchedulerOptions options;
  options.ports = startup.scheduler_ports;
  options.workers = startup.workers;
  options.servers = startup.servers;
  options.heartbeat_timeout_s = process.settings.deadlines.heartbeat;
  options.join_timeout_s = process.settings.deadlines.join;
  options.cut = process.cut;
  options.terms = process.terms();
  options.address = scheduler_listens_at(startup, secret);
  options.origin = startup.origin;
  std::vector<std::uint16_t> others = startup.scheduler_ports;
  std::unique_ptr<van::Scheduler> made;
  try {
    made = std::make_unique<van::Scheduler>(options, secret.credentials);
    std::erase(others, made->port());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kPortTaken || van::find_rival(others, secret.credentials).empty()) throw;
  }
  // Ranks that look for one of two schedulers of this name would find either.
  if (const std::string where = van::find_rival(others, secret.credentials); !where.empty()) {
    made.reset();
    throw Error(
        ErrorCode::kMismatch,
        "another process with rank 0 of the job '" + startup.job + "' runs on this host, its scheduler at " + where,
        "give each job a MASTER_PORT or BPS_JOB_ID of its own, and each process a rank; end processes that are "
        "left over");
  }
  return made;
}

}  // namespace bps::node
