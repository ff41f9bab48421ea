// SPDX-License-Identifier: Apache-2.0
// Makes the worker of a view: its options, its loops and their connections to the servers.
#include <algorithm>

#include "core/log.h"
#include "node/view.h"
#include "tensor/partition.h"
#include "transport/rdma/listener_address.h"
#include "transport/tcp/link_probe.h"
#include "transport/tcp/tcp_rails.h"
#include "van/select.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

// A smaller credit counts partitions, as in BytePS; a larger one counts bytes.
constexpr std::uint64_t kLeastCreditInBytes = 1000;
// A link that takes longer is slow beyond doubt.
constexpr double kMeasure_s = 5;
// TCP may not get through at all where RDMA is used, which says nothing about the link.
constexpr double kMeasureForRdma_s = 2;
// One TCP connection fills links up to this rate in bytes per second: 10 Gbit/s. What it carries over a faster one says
// little about RDMA.
constexpr double kMostOfTcp = 1.25e9;

// Returns true when TCP takes the link by which `kind` reaches the server: a rail of RDMA may be another network.
bool tcp_takes_link(const van::Node& server, transport::Kind kind) {
  if (kind != transport::Kind::kRdma) return kind == transport::Kind::kTcp;
  const auto tcp = transport::tcp::parse_addresses(as_text(*van::address_of(server, transport::Kind::kTcp)));
  const auto rdma = codec::decode<transport::rdma::ListenerAddress>(*van::address_of(server, kind));
  if (!tcp || !rdma) return false;
  return std::ranges::any_of(rdma->entries, [&](const auto& rail) { return rail.host == tcp->front().host; });
}

bool has_several_hosts(const van::Membership& members) {
  const std::string& first = members.nodes.front().host_key;
  return std::ranges::any_of(members.nodes, [&](const van::Node& node) { return node.host_key != first; });
}

worker::WorkerOptions worker_options(const ProcessOptions& options, const van::Membership& members,
                                     const van::Hosts& hosts) {
  worker::WorkerOptions made;
  made.hosts = hosts;
  made.survives_servers = options.survives_servers();
  made.times_operations = options.settings.metrics.port.has_value() || options.settings.trace.is_on();
  made.key_map.hash = options.key_hash;
  made.key_map.servers = members.servers;
  made.key_map.slots = members.server_of_slot();
  made.key_map.workers = members.workers;
  made.key_map.built_in_coefficient = options.settings.worker.built_in_coefficient;
  made.key_map.mixed_bound = options.settings.worker.mixed_bound;
  made.cut = options.cut;
  made.cut.server_loops = members.all_server_loops();
  made.server_places = van::ServerPlaces(members);
  made.weights = van::ServerWeights::of_job(members, hosts);
  for (std::uint32_t rank = 0; members.has_embedded_servers() && rank < members.workers; ++rank) {
    made.own_server.push_back(static_cast<std::uint32_t>(members.worker(rank)->server_rank));
  }
  return made;
}

worker::WorkerLoopOptions loop_options(const WorkerSettings& settings) {
  worker::WorkerLoopOptions made;
  made.largest_partition = settings.partition_bytes;
  made.staging_bytes = settings.staging_bytes;
  made.gpudirect = settings.gpudirect;
  const std::uint64_t credit = settings.scheduling_credit;
  made.scheduling_credit = credit < kLeastCreditInBytes ? credit * settings.partition_bytes : credit;
  return made;
}

}  // namespace

void View::make_worker_loop(std::size_t index, const worker::Worker& worker, van::Van& van) {
  worker::WorkerLoopOptions options = loop_options(options_.settings.worker);
  options.index = index;
  options.survives_servers = worker.survives_servers();
  options.places = worker.planner().places().count();
  options.epoch = van.membership().epoch;
  options.name = van.self().describe();
  options.silence_s = options_.settings.deadlines.heartbeat;
  Loop& loop = loops_[index];
  loop.reactor->call([&] {
    loop.worker_loop = std::make_unique<worker::WorkerLoop>(options, *loop.reactor);
    loop.worker_loop->events.when_silent = [this](std::uint32_t node) {
      if (!is_leaving_) events_.inquire(node);
    };
    loop.worker_loop->events.when_lost = [this](std::uint32_t node, const std::string& why) {
      lose_connection(node, why);
    };
    loop.worker_loop->events.when_path_lost = [this, index](std::size_t place, std::size_t pair) {
      connector_->restore(index, place, pair);
    };
    if (hosts_.active()) loop.worker_loop->relay_for(&loop.server_loop->relay_by(loop.worker_loop->relay()));
  });
}

// Returns the largest partition that this process wishes for: what the user has set, or what suits the link of its
// host, which the first rank of the host measures by a TCP connection. It can cut no larger ones than its settings say.
std::uint64_t View::wished_partition(const van::Van& van) const {
  const WorkerSettings& settings = options_.settings.worker;
  const std::uint64_t most = settings.partition_bytes;
  if (settings.partition_given) return most;
  const van::Membership& members = van.membership();
  if (!has_several_hosts(members)) return most;
  const van::Node& self = van.self();
  const std::uint32_t host = hosts_.host_of(static_cast<std::uint32_t>(self.worker_rank));
  if (hosts_.ranks(host).front() != static_cast<std::uint32_t>(self.worker_rank)) return most;
  // Each host measures with another server, where there are several.
  for (std::uint32_t i = 1; i <= members.servers; ++i) {
    const van::Node& server = *members.server((host + i) % members.servers);
    if (server.host_key == self.host_key) continue;
    bool is_rdma = false;
    try {
      const transport::Kind kind = van::select_transport(options_.allowed, self, server);
      if (!tcp_takes_link(server, kind)) continue;
      is_rdma = kind == transport::Kind::kRdma;
      const double rate =
          transport::tcp::measure_link({.address = *van::address_of(server, transport::Kind::kTcp),
                                        .hello = {.node = self.id},
                                        .deadline = Deadline::after(is_rdma ? kMeasureForRdma_s : kMeasure_s),
                                        .whom = server.describe()},
                                       credentials_);
      if (is_rdma && rate > kMostOfTcp) return most;
      std::uint64_t bytes = tensor::partition_for_link(rate);
      // Each write of RDMA has a price of its own.
      if (is_rdma) bytes = std::max(bytes, tensor::CutRule{}.min_partition_bytes);
      log_info("the link to " + server.describe() + " carries " + std::to_string(static_cast<long>(rate / 1e6)) +
               " MB/s, for which partitions of " + std::to_string(bytes >> 10) + " KiB are best");
      return bytes;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kTimeout && !is_rdma) return tensor::partition_for_link(0);
      log_info(std::string("the link to ") + server.describe() + " could not be measured: " + error.what());
      return most;
    }
  }
  return most;
}

std::unique_ptr<worker::Worker> View::connect_worker(van::Van& van) {
  worker::WorkerOptions options = worker_options(options_, van.membership(), hosts_);
  options.trace = trace_;
  auto worker = std::make_unique<worker::Worker>(std::move(options), van);
  connector_ = std::make_unique<Connector>(options_, van.membership(), van.self(), hosts_, loops_);
  const double patience_s = options_.settings.deadlines.join;
  const Deadline deadline = Deadline::after(patience_s);
  for (std::size_t i = 0; i < options_.worker_loops; ++i) {
    make_worker_loop(i, *worker, van);
    const std::vector<std::size_t> places =
        worker->planner().places().needed(i, options_.worker_loops, worker->declarations().world());
    for (const std::size_t place : places) connector_->connect(i, place, deadline);
    Loop& loop = loops_[i];
    loop.reactor->call([&] { loop.reactor->add(loop.worker_loop.get()); });
    worker->add_loop(loop.worker_loop.get(), places);
  }
  worker->planner().connect_by([this, patience_s](std::size_t worker_loop, std::size_t place) {
    connector_->connect(worker_loop, place, Deadline::after(patience_s));
  });
  // All ranks cut tensors in the same way, so they agree on the size. The barrier also waits for relays: one that is
  // not connected yet could not pass on what it is sent.
  const std::uint64_t most = van.barrier(worker->declarations().world(), patience_s, wished_partition(van));
  if (most > 0) worker->limit_partitions(most);
  return worker;
}

void View::make_worker(van::Van& van) {
  worker_ = connect_worker(van);
  worker_->on_failure = [this] { events_.on_failure(Failure::kOfOperation); };
  std::vector<EarlyEvent> early;
  {
    const std::lock_guard lock(mutex_);
    ready_worker_ = worker_.get();
    early.swap(early_events_);
  }
  for (const auto& [node, why, lost] : early) lost ? lose_node(node, why) : leave_node(node, why);
}

}  // namespace bps::node
