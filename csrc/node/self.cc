// SPDX-License-Identifier: Apache-2.0
#include "node/self.h"

#include <unistd.h>

#include <limits>
#include <span>

#include "core/hmac.h"
#include "node/local_address.h"
#include "node/tcp_rails.h"
#include "van/select.h"

namespace bps::node {

Lineage new_lineage() {
  Lineage lineage;
  random_bytes(std::as_writable_bytes(std::span(&lineage.identity, 1)));
  return lineage;
}

van::VanOptions van_options(const ProcessOptions& options, const JobSecret& secret, const Lineage& lineage,
                            std::uint16_t hosted_port) {
  const Startup& startup = options.startup;
  const Deadlines& deadlines = options.settings.deadlines;
  van::VanOptions van;
  van.scheduler_host = startup.scheduler_host;
  // Ranks of the scheduler's host reach it without the network, whichever of the host's names they were told.
  if (options.is_hosted_by_rank_0() && (secret.one_host || is_of_this_host(van.scheduler_host))) {
    van.scheduler_host = "127.0.0.1";
  }
  van.scheduler_hint = startup.scheduler_hint;
  van.origin = startup.origin;
  van.scheduler_ports = startup.scheduler_ports;
  if (hosted_port != 0) van.scheduler_ports = {hosted_port};
  // The workers of a view that has ended come when they call the next operation, which may be late. A server is there
  // for them until it hears that no view follows.
  const double patience_s = startup.is_worker() ? deadlines.operation : std::numeric_limits<double>::infinity();
  van.join_timeout_s = lineage.renews != 0 ? patience_s : deadlines.join;
  if (lineage.resume_patience_s > 0) van.join_timeout_s = lineage.resume_patience_s;
  van.renews = lineage.renews;
  van.heartbeat_timeout_s = deadlines.heartbeat;
  van.outlives_scheduler = options.settings.job.min_workers > 0 && !options.is_hosted_by_rank_0();
  van.scheduler_patience_s = deadlines.scheduler;
  return van;
}

van::Node describe_self(const ProcessOptions& options, const Lineage& lineage) {
  const Startup& startup = options.startup;
  van::Node self;
  self.worker_rank = startup.worker_rank;
  self.server_rank = startup.server_rank;
  self.worker_loops = static_cast<std::uint16_t>(options.worker_loops);
  self.server_loops = static_cast<std::uint16_t>(options.server_loops);
  self.pid = static_cast<std::uint32_t>(::getpid());
  self.identity = lineage.identity;
  self.host = host_name();
  self.host_key = van::host_key(options.settings.transport.host_id);
  self.sums_on_host = options.sums_on_host();
  self.may_serve = options.may_serve;
  self.terms = options.terms();
  self.has_state = startup.is_worker() && ((lineage.renews != 0 && !lineage.is_late) || startup.resumes);
  return self;
}

// Returns loopback alone for peers of one host, which need no other interface, unless the settings name one.
std::vector<transport::tcp::TcpRail> tcp_rails(const ProcessOptions& options, const JobSecret& secret) {
  const TransportSettings& settings = options.settings.transport;
  if (secret.one_host && settings.node_host.empty() && settings.interface.empty()) return {{"127.0.0.1", "lo", 0}};
  return find_tcp_rails(settings, options.startup.scheduler_host);
}

}  // namespace bps::node
