// SPDX-License-Identifier: Apache-2.0
// Describes a process: in a report for people, as JSON, and in metrics. When somebody asks, everything is read from
// where it is anyway. The data path does nothing for it but count.
//
// Any thread may ask, while the view lives. It answers within two seconds, and names the loops that have not answered
// by then.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/exposition.h"
#include "node/startup.h"
#include "transport/handshake.h"

namespace bps::van {
struct Membership;
class Scheduler;
class Van;
}  // namespace bps::van

namespace bps::node {

class View;

class Report {
 public:
  // `credentials` are those of the job. `scheduler` is that of an embedded job, in the process of rank 0, else null.
  // `incarnation` is that of the scheduler. All outlive the report.
  Report(const ProcessOptions& options, const transport::Credentials& credentials, const van::Van& van,
         const View& view, const van::Scheduler* scheduler, std::uint64_t incarnation)
      : options_(options),
        credentials_(credentials),
        van_(van),
        view_(view),
        scheduler_(scheduler),
        incarnation_(incarnation) {}

  // Returns as JSON what this process waits for, whom the rounds of its servers wait for, its last operations and its
  // counters. See docs/troubleshooting.md.
  std::string dump(bool with_stacks) const;
  // Returns as JSON what the scheduler knows, and what all members of the job say of themselves. Throws what
  // ask_scheduler() throws.
  std::string dump_job(bool with_stacks) const;
  // Returns counters summed over the loops, then what is not a counter: "slot_bytes", "open_rounds", and
  // "silent_loops", which have not answered within two seconds and are not part of the others.
  std::vector<std::pair<std::string, std::uint64_t>> metrics() const;
  // Returns the same and more for Prometheus.
  MetricFamilies metric_families() const;
  // Names the transports to the servers that this process is connected to: "self", "shm", "tcp" or "rdma".
  std::vector<std::string> transports() const;

 private:
  std::string describe_job() const;
  van::Membership members() const;
  std::string describe_members() const;

  const ProcessOptions& options_;
  const transport::Credentials& credentials_;
  const van::Van& van_;
  const View& view_;
  const van::Scheduler* scheduler_;
  std::uint64_t incarnation_;
};

}  // namespace bps::node
