// SPDX-License-Identifier: Apache-2.0
// Introduces a process to the scheduler, and says where to look for it, by pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "node/job_secret.h"
#include "node/startup.h"
#include "transport/tcp/tcp_rails.h"
#include "van/membership.h"
#include "van/van.h"

namespace bps::node {

// Says what a process takes along into a view: the same identity in all views of its job, but another node in each.
struct Lineage {
  std::uint64_t identity = 0;
  std::uint32_t renews = 0;      // the node that it was in the view before; 0: it is new
  bool is_late = false;          // it had no state of the job then, which others had
  double resume_patience_s = 0;  // for workers that resume the job; 0: it was not suspended
};
Lineage new_lineage();

// `hosted_port` says where the scheduler in this process listens; 0: it hosts none.
van::VanOptions van_options(const ProcessOptions& options, const JobSecret& secret, const Lineage& lineage,
                            std::uint16_t hosted_port);
// Describes this process, without what others need to connect to it.
van::Node describe_self(const ProcessOptions& options, const Lineage& lineage);
// Returns the devices of this host that TCP uses, and by which the other members reach it.
std::vector<transport::tcp::TcpRail> tcp_rails(const ProcessOptions& options, const JobSecret& secret);

}  // namespace bps::node
