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

worker::WorkerOptions worker_options(const ProcessOptions& options, const van::Membership& members,
                                     const van::Hosts& hosts) {
  worker::WorkerOptions made;
  made.hosts = hosts;
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

worker::WorkerLoopOptions loop_options(const WorkerSettings& settings) {
  worker::WorkerLoopOptions made;
  made.largest_partition = settings.partition_bytes;
  made.staging_bytes = settings.staging_bytes;
  const std::uint64_t credit = settings.scheduling_credit;
  made.scheduling_credit = credit < kLeastCreditInBytes ? credit * settings.partition_bytes : credit;
  return made;
}

}  // namespace

void Process::make_worker_loop(std::size_t index, const worker::Worker& worker) {
  worker::WorkerLoopOptions options = loop_options(options_.settings.worker);
  options.index = index;
  options.places = worker.places();
  options.epoch = van_->membership().epoch;
  options.silence_s = options_.settings.deadlines.heartbeat;
  Loop& loop = (*loops_)[index];
  loop.reactor->call([&] {
    loop.worker_loop = std::make_unique<worker::WorkerLoop>(options, *loop.reactor);
    loop.worker_loop->when_silent = [this](std::uint32_t node) {
      if (!leaving_) van_->inquire(node);
    };
    loop.worker_loop->when_lost = [this](std::uint32_t node, const std::string& why) { lose_connection(node, why); };
    loop.worker_loop->when_path_lost = [this, index](std::size_t place, std::size_t pair) {
      connector_->restore(index, place, pair);
    };
    if (hosts_.active()) loop.worker_loop->relay_for(&loop.server_loop->relay_by(*loop.worker_loop));
  });
}

std::unique_ptr<worker::Worker> Process::connect_worker() {
  auto worker = std::make_unique<worker::Worker>(worker_options(options_, van_->membership(), hosts_), *van_);
  connector_ = std::make_unique<Connector>(options_, van_->membership(), van_->self(), hosts_, *loops_);
  const double patience_s = options_.settings.deadlines.join;
  const Deadline deadline = Deadline::after(patience_s);
  for (std::size_t i = 0; i < options_.worker_loops; ++i) {
    make_worker_loop(i, *worker);
    const std::vector<std::size_t> places = worker->places_needed(i, options_.worker_loops);
    for (const std::size_t place : places) connector_->connect(i, place, deadline);
    Loop& loop = (*loops_)[i];
    loop.reactor->call([&] { loop.reactor->add(loop.worker_loop.get()); });
    worker->add_loop(loop.worker_loop.get(), loop.reactor.get(), places);
  }
  worker->connect_by([this, patience_s](std::size_t worker_loop, std::size_t place) {
    connector_->connect(worker_loop, place, Deadline::after(patience_s));
  });
  // A relay that is not connected yet could not pass on what it is sent.
  if (hosts_.active()) van_->barrier(worker->world(), patience_s);
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
