// SPDX-License-Identifier: Apache-2.0
#include "node/loops.h"

#include <algorithm>
#include <cmath>
#include <future>

#include "core/limits.h"
#include "core/log.h"
#include "node/tcp_rails.h"
#include "transport/local/self_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "van/server_weights.h"

namespace bps::node {

using transport::Kind;

namespace {

// Lets one piece come while another one is summed. A group may have most of its sums where others have few.
constexpr std::uint32_t kFewestSlots = 2;

// Returns how many slots each worker loop gets here. Links are full to the end where as much is under way to each
// server as it sums in comparison. Otherwise servers with little to do are ahead, and only the others' links are busy
// at the end.
std::uint32_t window_of(std::uint32_t most, const van::Membership& members, const van::Node& self) {
  if (self.server_rank < 0) return most;
  const double load = van::ServerWeights::load_of_loop(members, static_cast<std::uint32_t>(self.server_rank));
  return std::clamp(static_cast<std::uint32_t>(std::lround(load * most)), std::min(most, kFewestSlots), most);
}

}  // namespace

Loops::Loops(const ProcessOptions& options, std::vector<transport::tcp::TcpRail> tcp_rails,
             const transport::Credentials& credentials, TraceWriter* trace)
    : options_(options), credentials_(credentials), tcp_rails_(std::move(tcp_rails)) {
  for (const transport::tcp::TcpRail& rail : tcp_rails_) log_info("TCP uses " + describe(rail));
  find_rails();
  for (std::size_t i = 0; i < options_.loops(); ++i) make_loop(i);
  make_rdma_transports();
  for (const auto& loop : loops_) {
    if (trace != nullptr) loop->reactor->counters().trace = &trace->add_ring();
    loop->reactor->start();
  }
}

void Loops::stop() {
  for (const auto& loop : loops_) loop->reactor->stop();
}

void Loops::find_rails() {
  if (!options_.allows(Kind::kRdma)) return;
  const transport::rdma::RdmaRails found = transport::rdma::find_rdma(options_.rdma, options_.rdma_wish());
  if (!found.usable()) return do_without_rdma(found.why_not, found.hint);
  rails_ = found.rails;
  if (const std::string& gpu = options_.rdma.near_gpu; !gpu.empty()) {
    log_info("RDMA uses the ports that are nearest to the GPU at PCI " + gpu + ", where some are near");
  }
}

void Loops::do_without_rdma(const std::string& why, const std::string& hint) {
  rails_.clear();
  if (!options_.allows(Kind::kTcp)) {
    throw Error(ErrorCode::kUnreachable, "BPS_TRANSPORT requires RDMA, which cannot be used: " + why, hint);
  }
  log_info("RDMA is not used: " + why);
}

void Loops::make_loop(std::size_t index) {
  const TransportSettings& settings = options_.settings.transport;
  auto loop = std::make_unique<Loop>();
  loop->reactor = std::make_unique<transport::Reactor>("bps-loop-" + std::to_string(index), options_.spin);
  transport::Reactor& reactor = *loop->reactor;
  auto self = std::make_unique<transport::local::SelfTransport>(reactor.counters());
  loop->transports[static_cast<std::size_t>(Kind::kSelf)] = self.get();
  reactor.add(std::move(self));
  add(*loop, Kind::kShm,
      std::make_unique<transport::shm::ShmTransport>(
          reactor.loop(), credentials_, reactor.counters(),
          transport::shm::ShmOptions{settings.shm_cma, settings.shm_fence == "kill"}));
  add(*loop, Kind::kTcp,
      std::make_unique<transport::tcp::TcpTransport>(
          reactor.loop(), credentials_, reactor.counters(),
          transport::tcp::TcpOptions{settings.tcp_congestion, options_.settings.deadlines.heartbeat}, tcp_rails_));
  loops_.push_back(std::move(loop));
}

void Loops::add(Loop& loop, Kind kind, std::unique_ptr<transport::Transport> transport) {
  if (options_.faults.any()) {
    transport = std::make_unique<transport::fault::FaultTransport>(std::move(transport), options_.faults);
  }
  loop.transports[static_cast<std::size_t>(kind)] = transport.get();
  loop.reactor->add(std::move(transport));
}

// Makes the transports on every loop or on none: what this process publishes holds for all loops. A rail that cannot be
// opened is left out, as long as there are others.
void Loops::make_rdma_transports() {
  std::vector<std::unique_ptr<transport::Transport>> made;
  while (!rails_.empty() && made.size() < loops_.size()) {
    transport::Reactor& reactor = *loops_[made.size()]->reactor;
    try {
      made.push_back(transport::rdma::make_rdma_transport(reactor.loop(), credentials_, reactor.counters(), rails_,
                                                          options_.rdma));
    } catch (const transport::rdma::RailError& error) {
      if (rails_.size() == 1) return do_without_rdma(error.what(), error.hint());
      log_warning(std::string(error.what()) + " (" + error.hint() + "); the other rails are used");
      made.clear();
      rails_.erase(rails_.begin() + static_cast<std::ptrdiff_t>(error.rail));
    }
  }
  for (const transport::rdma::Rail& rail : rails_) log_info("RDMA uses " + describe(rail));
  for (std::size_t i = 0; i < made.size(); ++i) add(*loops_[i], Kind::kRdma, std::move(made[i]));
}

void Loops::start_servers(const van::Membership& members, const van::Node& self, const WhenLost& when_lost,
                          const std::function<void()>& when_failed) {
  server::ServerLoopOptions options;
  options.window = window_of(options_.settings.server.window, members, self);
  options.slot_memory = options_.settings.server.slot_memory / loops_.size();
  options.kept_memory = memory_limit() / 4 * 3 / loops_.size();
  options.largest_partition = 1 << 30;
  options.epoch = members.epoch;
  options.node = self.id;
  for (const auto& loop : loops_) {
    loop->reactor->call([&] {
      options.reactor = loop->reactor.get();
      std::vector<transport::Transport*> write_into_slots{loop->transport(Kind::kTcp)};
      if (transport::Transport* rdma = loop->transport(Kind::kRdma)) write_into_slots.push_back(rdma);
      loop->server_loop = std::make_unique<server::ServerLoop>(options, members, std::move(write_into_slots),
                                                               loop->reactor->counters());
      loop->server_loop->when_lost = when_lost;
      loop->server_loop->when_round_fails(when_failed);
      loop->recorder = &loop->server_loop->recorder();
      for (const van::Group& group : loop->groups) loop->server_loop->add_group(group);
      loop->reactor->add(loop->server_loop.get());
      for (auto& [kind, incoming] : std::exchange(loop->early, {})) accept_on(*loop, kind, std::move(incoming));
    });
  }
}

void Loops::accept(Kind kind, std::unique_ptr<transport::IncomingConnection> incoming) {
  const transport::Hello& hello = incoming->hello;
  if (hello.server_loop >= loops_.size() || hello.plane == transport::Plane::kVan ||
      hello.plane == transport::Plane::kProbe) {
    log_warning("rejected a connection of node " + std::to_string(hello.node) + ": it names server loop " +
                std::to_string(hello.server_loop) + " of " + std::to_string(loops_.size()));
    return;
  }
  Loop& loop = *loops_[hello.server_loop];
  // A posted function must be copyable.
  auto moved = std::make_shared<std::unique_ptr<transport::IncomingConnection>>(std::move(incoming));
  loop.reactor->loop().post([&loop, kind, moved] { accept_on(loop, kind, std::move(*moved)); });
}

void Loops::accept_on(Loop& loop, Kind kind, std::unique_ptr<transport::IncomingConnection> incoming) {
  if (!loop.server_loop) {
    loop.early.emplace_back(kind, std::move(incoming));
    return;
  }
  try {
    loop.server_loop->accept(std::move(incoming), loop.transport(kind));
  } catch (const Error& error) {  // the other connections are not affected
    log_warning("could not accept a connection over " + std::string(transport::to_string(kind)) + ": " + error.what() +
                " (" + error.hint() + ")");
  }
}

void Loops::add_group(const van::Group& group, std::function<void()> known) {
  const auto left = std::make_shared<std::atomic<std::size_t>>(loops_.size());
  for (const auto& loop : loops_) {
    loop->reactor->loop().post([&loop = *loop, group, left, known] {
      loop.groups.push_back(group);
      if (loop.server_loop) loop.server_loop->add_group(group);
      if (left->fetch_sub(1) == 1 && known) known();
    });
  }
}

void Loops::end_view(const Error& why) {
  for (const auto& loop : loops_) {
    loop->reactor->loop().post([&loop = *loop, why] {
      if (loop.server_loop) loop.server_loop->end_view(why);
    });
  }
}

void Loops::lose_node(std::uint32_t node, const std::string& why) {
  for (const auto& loop : loops_) {
    loop->reactor->loop().post([&loop = *loop, node, why] {
      if (loop.server_loop) loop.server_loop->lose_node(node, why);
    });
  }
}

void Loops::leave_node(std::uint32_t node, const std::string& why) {
  for (const auto& loop : loops_) {
    loop->reactor->loop().post([&loop = *loop, node, why] {
      if (loop.server_loop) loop.server_loop->leave_node(node, why);
    });
  }
}

void Loops::fail_tensor(std::uint32_t tensor, const std::string& why) {
  for (const auto& loop : loops_) {
    loop->reactor->loop().post([&loop = *loop, tensor, why] {
      if (loop.server_loop) loop.server_loop->fail_tensor(tensor, why);
    });
  }
}

bool Loops::are_servers_quiet(const Deadline& deadline) const {
  std::vector<std::future<bool>> answers;
  for (const auto& loop : loops_) {
    answers.push_back(
        loop->reactor->ask([&loop = *loop] { return !loop.server_loop || loop.server_loop->is_quiet(); }));
  }
  return std::ranges::all_of(answers, [&](std::future<bool>& answer) {
    return answer.wait_until(deadline.at()) == std::future_status::ready && answer.get();
  });
}

bool Loops::serves() const {
  return std::ranges::any_of(loops_, [](const auto& loop) { return loop->server_loop && loop->server_loop->serves(); });
}

std::string Loops::find_stuck() {
  std::string stuck;
  for (const auto& loop : loops_) {
    transport::Reactor& reactor = *loop->reactor;
    if (reactor.turns() != loop->seen_turns || reactor.is_in_set_up()) continue;
    reactor.loop().wake();  // the loop may sleep: short time-outs leave no time for its own look around
    stuck = reactor.name();
  }
  if (!stuck.empty()) return stuck;
  for (const auto& loop : loops_) loop->seen_turns = loop->reactor->turns();
  return "";
}

}  // namespace bps::node
