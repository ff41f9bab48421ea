// SPDX-License-Identifier: Apache-2.0
// Finds the place of this process in its job, and the options that follow from that and from the settings.
//
// Everything here is parsed and checked once, before anything is started. What cannot be used throws kInvalidArgument.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/settings.h"
#include "tensor/key_map.h"
#include "transport/fault/fault.h"
#include "transport/kind.h"
#include "transport/rdma/rail.h"
#include "transport/reactor.h"
#include "van/membership.h"
#include "van/origin.h"
#include "van/terms.h"

namespace bps::node {

// Holds the launcher's variables, already understood.
struct Startup {
  std::int32_t worker_rank = van::kNoRank;
  std::int32_t server_rank = van::kNoRank;
  std::uint32_t workers = 1;
  std::uint32_t servers = 1;
  bool hosts_scheduler = false;
  bool joint = false;    // every worker is also a server
  bool resumes = false;  // this process has suspended the job, and has its state
  std::string scheduler_host = "127.0.0.1";
  std::vector<std::uint16_t> scheduler_ports;
  std::uint32_t processes_on_host = 1;  // those of this job, as far as known: tells whether spinning would hurt
  std::string job;
  van::Origin origin;          // set where the job has no name but that of its port
  std::string scheduler_hint;  // what to check if the scheduler is not found; empty: the classic variables

  bool is_worker() const { return worker_rank != van::kNoRank; }
  bool is_server() const { return server_rank != van::kNoRank; }
};

// Returns true when a worker offers to be a server beside the dedicated ones (BPS_PLACEMENT). Jobs whose members come
// and go, and jobs whose servers keep weights, have only the dedicated ones.
bool may_serve(const Settings& settings, const Startup& startup);

// Takes counts and scheduler address from the classic variables, for bps-server and bps-scheduler. The ranks stay
// kNoRank. Throws kInvalidArgument naming the variable that is missing.
Startup startup_from(const JobSettings& settings);

struct ProcessOptions {
  ProcessOptions(const Settings& settings, const Startup& startup);

  Settings settings;
  Startup startup;
  std::vector<transport::Kind> allowed;  // the best first
  transport::rdma::RdmaOptions rdma;
  transport::fault::FaultPlan faults;
  tensor::KeyHash key_hash;
  tensor::CutRule cut;  // without the number of server loops, which follows from the members
  std::size_t worker_loops = 0;
  std::size_t server_loops = 0;
  transport::Spin spin;

  bool may_serve = false;  // see may_serve()

  std::size_t loops() const { return std::max(worker_loops, server_loops); }
  bool allows(transport::Kind kind) const;
  // Returns true when operations survive the loss of servers, if no host sums first: what a relay has summed is lost
  // with it.
  bool survives_servers() const {
    if (settings.job.server_failover == "auto" && settings.worker.async) return false;  // servers keep the weights
    return settings.job.server_failover != "0" && settings.job.min_workers > 0 && !startup.joint;
  }
  // Returns true when this worker is willing and able to sum with the ranks of its host first.
  bool sums_on_host() const {
    return startup.is_worker() && settings.worker.host_sum && !settings.worker.async && allows(transport::Kind::kShm);
  }
  // Returns true when the scheduler is in the process of rank 0. Where servers are counted it is a process of its own.
  bool is_hosted_by_rank_0() const { return startup.joint && !settings.job.servers; }
  van::Terms terms() const;
  // Returns the address of this host that peers should use.
  std::string address() const;
  // Returns the ports of the host that RDMA should work on, as far as the settings of the network say.
  transport::rdma::GidWish rdma_wish() const;

 private:
  std::size_t find_worker_loops() const;
};

}  // namespace bps::node
