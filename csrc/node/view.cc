// SPDX-License-Identifier: Apache-2.0
#include "node/view.h"

#include <utility>

#include "server/sum_rate.h"
#include "van/van.h"

namespace bps::node {

View::View(const ProcessOptions& options, std::vector<transport::tcp::TcpRail> rails, TraceWriter* trace, Events events)
    : options_(options),
      trace_(trace),
      events_(std::move(events)),
      loops_(options, std::move(rails), credentials_, trace) {
  const auto enter = [this](transport::Kind kind, std::unique_ptr<transport::IncomingConnection> incoming) {
    loops_.accept(kind, std::move(incoming));
  };
  // Everybody connects to servers, and the ranks of a host to its relays.
  if (options_.startup.is_server() || options_.may_serve) {
    listeners_ =
        std::make_unique<Listeners>(loops_.tcp_rails(), loops_.rails(), options_.settings.transport.ports, enter);
  } else if (options_.sums_on_host()) {
    listeners_ = std::make_unique<Listeners>(enter);
  }
}

// Destroys listeners first: they end a thread, which enters into the loops until then.
View::~View() {
  stop();
  listeners_.reset();
  worker_.reset();
  connector_.reset();
}

// Returns the bytes per second of all rails that data goes over; 0: nobody knows.
std::uint64_t View::link_speed() const {
  constexpr std::uint64_t kBytesPerMbit = 1'000'000 / 8;
  if (const auto& given = options_.settings.transport.link_gbps) return static_cast<std::uint64_t>(*given * 1e9 / 8);
  std::uint64_t mbit = 0;
  for (const transport::rdma::Rail& rail : loops_.rails()) mbit += rail.speed;
  if (mbit > 0) return mbit * kBytesPerMbit;
  for (const transport::tcp::TcpRail& rail : loops_.tcp_rails()) mbit += rail.speed;
  return mbit * kBytesPerMbit;
}

// Returns the bytes of pushes per second; 0: nobody knows. It is measured only where weights of servers follow it: see
// ServerWeights.
std::uint64_t View::sum_rate(std::uint64_t link) const {
  if (!options_.startup.is_server() && !options_.may_serve) return 0;
  if (const auto& given = options_.settings.server.sum_gbps) return static_cast<std::uint64_t>(*given * 1e9 / 8);
  const JobSettings& job = options_.settings.job;
  if (link == 0 || job.min_workers > 0 || job.placement == "mixed") return 0;
  return server::coarse_rate(server::measure_sum_rate(options_.server_loops));
}

void View::describe(van::Node& self) const {
  self.link = link_speed();
  self.sum_rate = sum_rate(self.link);
  if (listeners_) self.addresses = listeners_->addresses();
  if (!options_.startup.is_server() && !options_.may_serve && !loops_.rails().empty()) {
    // Nobody connects to a worker by it, but servers of the same fabric are reached by RDMA only if it has RDMA too.
    self.addresses.push_back({std::string(transport::to_string(transport::Kind::kRdma)), {}});
  }
}

void View::start(van::Van& van) {
  members_ = &van.membership();
  hosts_ = van::Hosts(*members_);
  start_servers(van);
  if (options_.startup.is_worker()) make_worker(van);
}

void View::start_servers(van::Van& van) {
  if (van.self().server_rank >= 0 || hosts_.active()) {
    loops_.start_servers(
        van.membership(), van.self(),
        [this](std::uint32_t node, const std::string& why) { lose_connection(node, why); },
        [this] { events_.on_failure(Failure::kOfRound); });
  } else {
    listeners_.reset();
  }
}

void View::stop() {
  is_leaving_ = true;
  if (connector_) connector_->stop();
  loops_.stop();
}

void View::use(const transport::Credentials& credentials) {
  credentials_ = credentials;
  if (listeners_) listeners_->use(credentials_);
}

void View::lose_node(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (is_early()) return early_events_.push_back({node, why, true});
  if (worker::Worker* const working = worker(); working != nullptr && !is_leaving_) {
    const bool host_lost = node == 0 && options_.is_hosted_by_rank_0();
    working->news().lose_node(node, host_lost ? why + "; " + members_->worker(0)->describe() + " hosts it" : why);
  }
  if (node != 0) loops_.lose_node(node, why);
}

void View::leave_node(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (is_early()) return early_events_.push_back({node, why, false});
  if (worker::Worker* const working = worker(); working != nullptr && !is_leaving_)
    working->news().leave_node(node, why);
  loops_.leave_node(node, why);
}

void View::end_view(const Error& why) {
  loops_.end_view(why);
  if (worker::Worker* const working = worker()) working->news().end_view(why);
}

void View::lose_connection(std::uint32_t node, const std::string& why) {
  if (!is_leaving_) events_.suspect(node, why);
}

}  // namespace bps::node
