// The loops of a process: how many, which transports they carry, and the server_loops of a server on them.
#include <algorithm>
#include <thread>

#include "core/log.h"
#include "node/local_address.h"
#include "node/process_impl.h"
#include "transport/fault/fault.h"
#include "transport/local/self_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace bps::node {
namespace {

constexpr int kThreadSpin_us = 20;
constexpr int kCallerSpin_us = 50;

// RDMA cannot be used: an error where nothing else may be, else a line in the log.
void do_without_rdma(bool needed, const std::string& why, const std::string& hint) {
  if (needed) {
    throw Error(ErrorCode::kUnreachable, "RDMA is asked for (BPS_TRANSPORT) and cannot be used: " + why, hint);
  }
  log_info("no RDMA: " + why);
}

}  // namespace

void Process::Impl::find_rails() {
  if (!allows("rdma")) return;
  const std::string host =
      local_address(config_.text("BPS_NODE_HOST"), config_.text("BPS_INTERFACE"), startup_.scheduler_host);
  const transport::rdma::RdmaRails post = transport::rdma::find_rdma(
      rdma_options_,
      {.index = std::nullopt, .address = numeric_address(host), .interface = config_.text("BPS_INTERFACE")});
  if (!post.usable()) return do_without_rdma(!allows("tcp"), post.why_not, post.hint);
  rails_ = post.rails;
  for (const transport::rdma::Rail& rail : rails_) {
    log_info("rdma on " + rail.device + " port " + std::to_string(rail.port) + ", GID " +
             std::to_string(rail.gid_index) + ": " + rail.reason);
  }
}

void Process::Impl::make_loops() {
  const auto cores = static_cast<std::int64_t>(std::max(1U, std::thread::hardware_concurrency()));
  worker_loops_ = is_worker() ? static_cast<std::size_t>(config_.integer("BPS_PUSH_THREAD", 1, 64)) : 0;
  server_loops_ = is_server() ? static_cast<std::size_t>(config_.integer("BPS_SERVER_ENGINE_THREAD", 0, 64)) : 0;
  if (startup_.joint) {
    // A loop carries a worker_loop and a server_loop, so that what a rank sends itself never changes threads.
    worker_loops_ = server_loops_ = std::max(worker_loops_, server_loops_);
  } else if (is_server() && server_loops_ == 0) {
    server_loops_ = static_cast<std::size_t>(std::min<std::int64_t>(cores, 4));
  }
  const std::size_t count = std::max(worker_loops_, server_loops_);
  const auto wanted = static_cast<int>(config_.integer("BPS_SPIN_US", -1, 1'000'000));
  transport::Spin spin{.thread_us = wanted, .caller_us = wanted};
  if (wanted < 0) {  // a caller that waits leaves its core free; a thread takes one more
    const auto processes = static_cast<std::int64_t>(startup_.processes_on_host);
    spin.thread_us = static_cast<std::int64_t>(count) * processes < cores ? kThreadSpin_us : 0;
    spin.caller_us = processes <= cores ? kCallerSpin_us : 0;
  }
  for (std::size_t i = 0; i < count; ++i) {
    auto loop = std::make_unique<Loop>();
    loop->reactor = std::make_unique<transport::Reactor>("bps-loop-" + std::to_string(i), spin);
    transport::Reactor& reactor = *loop->reactor;
    reactor.add(std::make_unique<transport::local::SelfTransport>(reactor.counters()));
    add(reactor, std::make_unique<transport::shm::ShmTransport>(reactor.loop(), credentials_, reactor.counters(),
                                                                config_.flag("BPS_SHM_CMA")));
    add(reactor, std::make_unique<transport::tcp::TcpTransport>(reactor.loop(), credentials_, reactor.counters(),
                                                                config_.text("BPS_TCP_CONGESTION")));
    loops_.push_back(std::move(loop));
  }
  make_rdma_transports();
  for (const auto& loop : loops_) loop->reactor->start();
}

void Process::Impl::add(transport::Reactor& reactor, std::unique_ptr<transport::Transport> transport) {
  const transport::fault::FaultPlan faults = transport::fault::FaultPlan::parse(config_.text("BPS_FAULT"));
  if (faults.any()) transport = std::make_unique<transport::fault::FaultTransport>(std::move(transport), faults);
  reactor.add(std::move(transport));
}

// On every loop or on none: what this process publishes holds for all of them.
void Process::Impl::make_rdma_transports() {
  std::vector<std::unique_ptr<transport::Transport>> made;
  try {
    for (std::size_t i = 0; !rails_.empty() && i < loops_.size(); ++i) {
      transport::Reactor& reactor = *loops_[i]->reactor;
      made.push_back(transport::rdma::make_rdma_transport(reactor.loop(), credentials_, reactor.counters(),
                                                          rails_[i % rails_.size()], rdma_options_));
    }
  } catch (const Error& error) {
    rails_.clear();
    return do_without_rdma(!allows("tcp"), error.what(), error.hint());
  }
  for (std::size_t i = 0; i < made.size(); ++i) add(*loops_[i]->reactor, std::move(made[i]));
}

void Process::Impl::make_server_loops() {
  server::ServerLoopOptions options;
  options.window = static_cast<std::uint32_t>(config_.integer("BPS_SERVER_WINDOW", 1, 4096));
  options.slot_memory = static_cast<std::uint64_t>(config_.integer("BPS_SERVER_MEMORY", 0, INT64_MAX)) / loops_.size();
  options.largest_partition = 1 << 30;
  for (const auto& loop : loops_) {
    loop->reactor->call([&, this] {
      std::vector<transport::Transport*> write_into_slots{loop->reactor->transport("tcp")};
      if (!rails_.empty()) write_into_slots.push_back(loop->reactor->transport("rdma"));
      loop->server_loop = std::make_unique<server::ServerLoop>(options, van_->membership(), std::move(write_into_slots),
                                                               loop->reactor->counters());
      for (const van::Group& group : loop->groups) loop->server_loop->add_group(group);
      loop->reactor->add(loop->server_loop.get());
      for (auto& [transport, incoming] : loop->early) accept_connection(*loop, transport, std::move(incoming));
      loop->early.clear();
    });
  }
}

}  // namespace bps::node
