// SPDX-License-Identifier: Apache-2.0
#include "node/startup.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "node/local_address.h"
#include "node/loop_count.h"
#include "node/near_gpu.h"
#include "node/tcp_rails.h"
#include "transport/rdma/rdma.h"
#include "transport/shm/shared_memory.h"
#include "van/select.h"

namespace bps::node {
namespace {

constexpr int kThreadSpin_us = 20;
constexpr int kCallerSpin_us = 50;
constexpr std::size_t kMostDefaultServerLoops = 4;

template <typename T>
T needed(const std::optional<T>& value, std::string_view variable, std::string_view alias) {
  if (value) return *value;
  throw Error(ErrorCode::kInvalidArgument, std::string(variable) + " is not set",
              "set it, or " + std::string(alias) + "; `bps config` explains it");
}

std::size_t cores() {
  return std::max(1U, std::thread::hardware_concurrency());
}

// Chooses whether threads spin. A caller that waits leaves its core free; a thread that spins takes one more.
transport::Spin choose_spin(std::optional<std::uint32_t> wanted_us, std::size_t loops, std::size_t processes) {
  if (wanted_us) return {.thread_us = static_cast<int>(*wanted_us), .caller_us = static_cast<int>(*wanted_us)};
  return {.thread_us = loops * processes < cores() ? kThreadSpin_us : 0,
          .caller_us = processes <= cores() ? kCallerSpin_us : 0};
}

// Returns the allowed transports, without those that this system does not have.
std::vector<transport::Kind> usable_transports(const std::string& setting) {
  std::vector<transport::Kind> allowed = van::allowed_transports(setting);
  const int error = transport::shm::SharedMemory::why_unavailable();
  if (error != 0) std::erase(allowed, transport::Kind::kShm);
  if (!allowed.empty()) return allowed;
  throw Error(ErrorCode::kTransport,
              std::string("this system lets no process share memory: memfd_create: ") + std::strerror(error),
              "allow memfd_create in the container's seccomp profile, or set BPS_TRANSPORT=auto, which uses TCP then");
}

// Returns true when all members are here: the job's scheduler has an address that only this host knows, or the launcher
// has started as many ranks here as there are.
bool is_on_one_host(const Settings& all, const Startup& who) {
  return is_loopback(who.scheduler_host) || (who.joint && all.job.local_size && *all.job.local_size >= who.workers);
}

std::vector<std::uint32_t> interface_speeds(const TransportSettings& settings, const Startup& who) {
  std::vector<std::uint32_t> speeds;
  for (const auto& rail : find_tcp_rails(settings, who.scheduler_host)) speeds.push_back(rail.speed);
  return speeds;
}

}  // namespace

Startup startup_from(const JobSettings& settings) {
  Startup startup;
  // BytePS counts machines in DMLC_NUM_WORKER; every local process is a worker.
  startup.workers = needed(settings.machines, "BPS_NUM_WORKERS", "DMLC_NUM_WORKER") * settings.local_size.value_or(1);
  startup.servers = needed(settings.servers, "BPS_NUM_SERVERS", "DMLC_NUM_SERVER");
  startup.scheduler_host = settings.root_uri;
  startup.scheduler_ports = {needed(settings.root_port, "BPS_ROOT_PORT", "DMLC_PS_ROOT_PORT")};
  startup.job = settings.id;
  return startup;
}

bool may_serve(const Settings& settings, const Startup& startup) {
  return startup.is_worker() && !startup.is_server() && settings.job.placement != "dedicated" &&
         settings.job.min_workers == 0 && !settings.worker.async;
}

ProcessOptions::ProcessOptions(const Settings& all, const Startup& who)
    : settings(all),
      startup(who),
      allowed(usable_transports(all.transport.allowed)),
      rdma(rdma_options(all, who.is_worker() && allows(transport::Kind::kRdma))),
      faults(transport::fault::FaultPlan::parse(all.transport.fault)),
      key_hash(tensor::parse_key_hash(all.worker.key_hash)),
      cut{.partition_bytes = all.worker.partition_bytes, .min_partition_bytes = all.worker.min_partition_bytes},
      worker_loops(who.is_worker() ? find_worker_loops() : 0),
      server_loops(who.is_server() || node::may_serve(all, who) ? all.server.loops : 0),
      may_serve(node::may_serve(all, who)) {
  if (all.worker.gpudirect && !all.worker.device_route) {
    throw Error(ErrorCode::kInvalidArgument, "BPS_GPUDIRECT=1 has no effect without BPS_DEVICE_ROUTE=1",
                "set BPS_DEVICE_ROUTE=1, too, in all processes of the job");
  }
  if (who.joint || may_serve) {
    // Every loop carries a worker loop and a server loop, so that what a rank sends to itself never changes threads.
    worker_loops = server_loops = loops();
  } else if (who.is_server() && server_loops == 0) {
    server_loops = std::min(cores(), kMostDefaultServerLoops);
  }
  spin = choose_spin(all.transport.spin_us, loops(), who.processes_on_host);
}

std::size_t ProcessOptions::find_worker_loops() const {
  if (settings.worker.loops > 0) return settings.worker.loops;
  LoopFacts facts{.shares_memory = allows(transport::Kind::kShm) && is_on_one_host(settings, startup)};
  if (facts.shares_memory) return default_worker_loops(facts);
  facts.has_rdma = allows(transport::Kind::kRdma) && transport::rdma::find_rdma(rdma, rdma_wish()).usable();
  facts.interfaces = interface_speeds(settings.transport, startup);
  return default_worker_loops(facts);
}

bool ProcessOptions::allows(transport::Kind kind) const {
  return std::ranges::find(allowed, kind) != allowed.end();
}

transport::rdma::GidWish ProcessOptions::rdma_wish() const {
  return {.index = std::nullopt,
          .address = numeric_address(address()),
          .interfaces = interface_names(settings.transport.interface)};
}

van::Terms ProcessOptions::terms() const {
  const WorkerSettings& worker = settings.worker;
  if (!startup.is_worker()) return {.min_workers = settings.job.min_workers};
  return {.min_workers = settings.job.min_workers,
          .placement = settings.job.placement,
          .key_hash = worker.key_hash,
          .built_in_coefficient = worker.built_in_coefficient,
          .mixed_bound = worker.mixed_bound,
          .min_partition_bytes = worker.min_partition_bytes,
          .async = worker.async,
          .placement_seconds = settings.job.placement_seconds,
          .device_route = worker.device_route,
          .gpu_host_sum = worker.gpu_host_sum,
          .survives_servers = survives_servers()};
}

std::string ProcessOptions::address() const {
  return local_address(settings.transport.node_host, settings.transport.interface, startup.scheduler_host);
}

}  // namespace bps::node
