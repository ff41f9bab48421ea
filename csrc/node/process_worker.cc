// SPDX-License-Identifier: Apache-2.0
// The worker of a process: its options, its loops and their connections to the servers.
#include "node/connector.h"
#include "node/process.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

// A smaller credit counts partitions, as in BytePS; a larger one counts bytes.
constexpr std::uint64_t kLeastCreditInBytes = 1000;

worker::WorkerOptions worker_options(const ProcessOptions& options, const van::Membership& members) {
  worker::WorkerOptions made;
  made.key_map.hash = options.key_hash;
  made.key_map.servers = members.servers;
  made.key_map.workers = members.workers;
  made.key_map.built_in_coefficient = options.settings.worker.built_in_coefficient;
  made.key_map.mixed_bound = options.settings.worker.mixed_bound;
  made.cut = options.cut;
  made.cut.server_loops = members.all_server_loops();
  made.loops_per_server = members.server(0)->server_loops;
  for (std::uint32_t rank = 0; rank < members.servers; ++rank) {
    const van::Node& server = *members.server(rank);
    if (server.server_loops == made.loops_per_server) continue;
    throw Error(ErrorCode::kMismatch,
                server.describe() + " runs " + std::to_string(server.server_loops) + " server loops, server 0 runs " +
                    std::to_string(made.loops_per_server),
                "set BYTEPS_SERVER_ENGINE_THREAD to the same number on all servers");
  }
  for (std::uint32_t rank = 0; options.startup.joint && rank < members.workers; ++rank) {
    made.own_server.push_back(static_cast<std::uint32_t>(members.worker(rank)->server_rank));
  }
  return made;
}

worker::WorkerLoopOptions loop_options(const WorkerSettings& settings, const worker::WorkerOptions& worker) {
  worker::WorkerLoopOptions made;
  made.servers = worker.cut.server_loops;
  made.largest_partition = settings.partition_bytes;
  made.staging_bytes = settings.staging_bytes;
  const std::uint64_t credit = settings.scheduling_credit;
  made.scheduling_credit = credit < kLeastCreditInBytes ? credit * settings.partition_bytes : credit;
  return made;
}

}  // namespace

std::unique_ptr<worker::Worker> Process::connect_worker() {
  const worker::WorkerOptions options = worker_options(options_, van_->membership());
  worker::WorkerLoopOptions of_loop = loop_options(options_.settings.worker, options);
  of_loop.epoch = van_->membership().epoch;
  of_loop.silence_s = options_.settings.deadlines.heartbeat;
  auto worker = std::make_unique<worker::Worker>(options, *van_);
  Connector connector(options_, van_->membership(), van_->self(), *loops_);
  const Deadline deadline = Deadline::after(options_.settings.deadlines.join);
  for (std::size_t i = 0; i < options_.worker_loops; ++i) {
    of_loop.index = i;
    Loop& loop = (*loops_)[i];
    loop.reactor->call([&] {
      loop.worker_loop = std::make_unique<worker::WorkerLoop>(of_loop, *loop.reactor);
      loop.worker_loop->when_silent = [this](std::uint32_t rank) {
        if (!leaving_) van_->inquire(van_->membership().server(rank)->id);
      };
      loop.worker_loop->when_lost = [this](std::uint32_t rank, const std::string& why) {
        lose_connection(van_->membership().server(rank)->id, why);
      };
    });
    connector.connect(i, deadline);
    loop.reactor->call([&] { loop.reactor->add(loop.worker_loop.get()); });
    worker->add_loop(loop.worker_loop.get(), loop.reactor.get());
  }
  routes_ = connector.routes();
  return worker;
}

void Process::make_worker() {
  auto worker = connect_worker();
  std::vector<EarlyEvent> early;
  {
    const std::lock_guard lock(mutex_);
    worker_ = std::move(worker);
    early.swap(early_events_);
  }
  for (const auto& [node, why, lost] : early) lost ? lose_node(node, why) : leave_node(node, why);
}

}  // namespace bps::node
