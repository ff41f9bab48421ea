// SPDX-License-Identifier: Apache-2.0
// Collects the metrics of a process.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>

#include "core/counter_families.h"
#include "node/report.h"
#include "node/scheduler_metrics.h"
#include "node/system_metrics.h"
#include "node/view.h"
#include "van/scheduler.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

using Type = MetricFamily::Type;

constexpr double kPatienceForLoops_s = 2;

// Sums what all loops have that have answered.
struct Sum {
  double slot_bytes = 0;
  double open_rounds = 0;
  double oldest_round_s = 0;
  double registered_bytes = 0;
  double open_operations = 0;
  double oldest_s = 0;
  double silent_loops = 0;
  std::map<std::uint32_t, worker::WorkerUsage::Server> servers;  // by node
};

Sum sum_of(const std::vector<Loops::Usage>& loops) {
  Sum sum;
  for (const Loops::Usage& loop : loops) {
    if (!loop.answered) ++sum.silent_loops;
    sum.slot_bytes += static_cast<double>(loop.slot_bytes);
    sum.open_rounds += static_cast<double>(loop.open_rounds);
    sum.oldest_round_s = std::max(sum.oldest_round_s, loop.oldest_round_s);
    sum.registered_bytes += static_cast<double>(loop.worker.registered_bytes);
    sum.open_operations += static_cast<double>(loop.worker.open_operations);
    sum.oldest_s = std::max(sum.oldest_s, loop.worker.oldest_s);
    for (const worker::WorkerUsage::Server& one : loop.worker.servers) {
      worker::WorkerUsage::Server& all = sum.servers[one.node];
      all.needs_slots |= one.needs_slots;
      all.small_slots += one.small_slots;
      all.large_slots += one.large_slots;
      all.partitions_in_flight += one.partitions_in_flight;
      all.bytes_in_flight += one.bytes_in_flight;
    }
  }
  return sum;
}

MetricFamily gauge(const char* name, const char* help) {
  return {Type::kGauge, name, help};
}
MetricFamily gauge(const char* name, const char* help, double value) {
  return gauge(name, help).add(value);
}

void append(MetricFamilies& to, MetricFamilies from) {
  std::ranges::move(from, std::back_inserter(to));
}

MetricFamilies peer_families(const Sum& sum, const van::Membership& members) {
  MetricFamily credits =
      gauge("bps_credits", "Landing slots of a peer that may be filled now, by size; only where it needs slots.");
  MetricFamily partitions =
      gauge("bps_partitions_in_flight", "Partitions sent to a peer, or about to be, and not answered.");
  MetricFamily bytes = gauge("bps_in_flight_bytes", "Bytes of the partitions in flight to a peer.");
  for (const auto& [node, server] : sum.servers) {
    const std::string peer = members.name_of(node);
    if (server.needs_slots) {
      credits.add(static_cast<double>(server.small_slots), {{"peer", peer}, {"size", "small"}});
      credits.add(static_cast<double>(server.large_slots), {{"peer", peer}, {"size", "large"}});
    }
    partitions.add(static_cast<double>(server.partitions_in_flight), {{"peer", peer}});
    bytes.add(static_cast<double>(server.bytes_in_flight), {{"peer", peer}});
  }
  return {credits, partitions, bytes};
}

MetricFamilies deal_families(const worker::Deal& deal, const van::Membership& members) {
  MetricFamily dealt = gauge("bps_dealt_bytes", "Bytes of the tensors that this worker has declared, by server.");
  MetricFamily due = gauge("bps_due_bytes", "The same as the servers' weights say; see bps_dealt_bytes.");
  for (std::uint32_t rank = 0; rank < deal.bytes.size(); ++rank) {
    const std::string peer = members.name_of(members.server(rank)->id);
    dealt.add(static_cast<double>(deal.bytes[rank]), {{"peer", peer}});
    due.add(deal.due[rank], {{"peer", peer}});
  }
  return {dealt, due};
}

}  // namespace

std::vector<std::pair<std::string, std::uint64_t>> Report::metrics() const {
  auto all = view_.loops().counters();
  const Sum sum = sum_of(view_.loops().usage(Deadline::after(kPatienceForLoops_s)));
  all.emplace_back("slot_bytes", static_cast<std::uint64_t>(sum.slot_bytes));
  all.emplace_back("open_rounds", static_cast<std::uint64_t>(sum.open_rounds));
  all.emplace_back("silent_loops", static_cast<std::uint64_t>(sum.silent_loops));
  if (const worker::Worker* const worker = view_.worker()) {
    const worker::Deal deal = worker->deal();
    all.emplace_back("dealt_bytes", deal.all());
    all.emplace_back("misdealt_bytes", deal.beyond());
  }
  return all;
}

MetricFamilies Report::metric_families() const {
  const van::Node& self = van_.self();
  const van::Membership& members = van_.membership();
  const std::vector<Loops::Usage> loops = view_.loops().usage(Deadline::after(kPatienceForLoops_s));
  const Sum sum = sum_of(loops);
  MetricFamilies families;
  families.push_back(gauge("bps_info", "Always 1; its labels are the version and the host of this process.")
                         .add(1, {{"version", BPS_VERSION}, {"host", self.host}}));
  families.push_back(gauge("bps_epoch", "Number of the view of the job that this process is in.", members.epoch));
  families.push_back(gauge("bps_workers", "Workers of this view.", members.workers));
  families.push_back(gauge("bps_servers", "Servers of this view.", members.servers));
  const std::chrono::duration<double> silence = Clock::now() - van_.heard();
  families.push_back(gauge("bps_heartbeat_age_seconds", "Time since the scheduler was heard last.", silence.count()));
  append(families, counter_families(view_.loops().counters()));
  MetricFamily up =
      gauge("bps_loop_up", "1: this loop answered within two seconds. 0: it did not, and gauges lack what it uses.");
  for (const Loops::Usage& loop : loops) up.add(loop.answered ? 1 : 0, {{"loop", loop.loop}});
  families.push_back(std::move(up));
  if (self.worker_rank >= 0) {
    families.push_back(
        gauge("bps_open_operations", "Operations of this worker that are not over.", sum.open_operations));
    families.push_back(
        gauge("bps_oldest_operation_age_seconds", "Time since the start of the oldest open operation.", sum.oldest_s));
    families.push_back(
        gauge("bps_registered_memory_bytes",
              "Memory that loops have registered with transports; what two have registered counts twice.",
              sum.registered_bytes));
    append(families, peer_families(sum, members));
    if (const worker::Worker* const worker = view_.worker()) append(families, deal_families(worker->deal(), members));
    families.push_back(view_.loops().operation_times());
    MetricFamily connections =
        gauge("bps_connections",
              "Connections of loops to loops of servers, by transport: shm, tcp, rdma, or self within the process.");
    std::map<std::string, double> counts;
    for (const std::string& transport : transports()) ++counts[transport];
    for (const auto& [transport, count] : counts) connections.add(count, {{"transport", transport}});
    families.push_back(std::move(connections));
  }
  families.push_back(gauge("bps_open_rounds", "Rounds that server loops of this process have open.", sum.open_rounds));
  families.push_back(gauge("bps_oldest_round_age_seconds",
                           "Time since the first push of the oldest round that is open.", sum.oldest_round_s));
  families.push_back(gauge("bps_slot_memory_bytes", "Landing slots and room for results.", sum.slot_bytes));
  std::vector<RdmaPort> ports;
  for (const transport::rdma::Rail& rail : view_.loops().rails()) {
    const RdmaPort port{rail.device, rail.port};
    if (std::ranges::find(ports, port) == ports.end()) ports.push_back(port);
  }
  append(families, rdma_port_families(ports));
  const bool joint = self.worker_rank >= 0 && self.server_rank >= 0;
  const std::int32_t rank = self.worker_rank >= 0 ? self.worker_rank : self.server_rank;
  label_all(families, {{"role", joint                   ? "joint"
                                : self.worker_rank >= 0 ? "worker"
                                                        : "server"},
                       {"rank", std::to_string(rank)}});
  if (scheduler_ != nullptr) append(families, scheduler_families(*scheduler_));
  return families;
}

std::vector<std::string> Report::transports() const {
  std::vector<std::string> names;
  for (const transport::Kind kind : view_.transports()) names.emplace_back(transport::to_string(kind));
  return names;
}

}  // namespace bps::node
