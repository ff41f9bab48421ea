// SPDX-License-Identifier: Apache-2.0
#include "sim_transport.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "sim_endpoints.h"

namespace bps::sim {
namespace {

class SimRegion final : public transport::Region {
 public:
  SimRegion(std::span<std::byte> bytes, std::uint64_t key) : Region(bytes) { key_ = key; }
};

// The far end of a connection that has arrived. Whoever destroys it has rejected the connection.
template <typename End>
class Incoming final : public transport::IncomingConnection {
 public:
  Incoming(const transport::Hello& who, std::unique_ptr<End> made) : IncomingConnection(who), end(std::move(made)) {}
  std::unique_ptr<End> end;
};

}  // namespace

SimTransport::SimTransport(Network& network, Machine machine, Counters& counters)
    : network_(network), machine_(machine), counters_(counters) {}
SimTransport::~SimTransport() = default;

transport::RegionPtr SimTransport::register_memory(std::span<std::byte> bytes) {
  auto region = std::make_shared<SimRegion>(bytes, ++last_key_);
  regions_[last_key_] = region;
  return region;
}

transport::RegionPtr SimTransport::region(std::uint64_t key) const {
  const auto found = regions_.find(key);
  return found == regions_.end() ? nullptr : found->second.lock();
}

template <typename End>
std::unique_ptr<End> SimTransport::connect(const transport::ConnectRequest& request, transport::Plane plane) {
  std::uint32_t numbers[2];
  std::memcpy(numbers, request.address.data(), sizeof numbers);
  const transport::Hello hello = request.hello_for(plane);
  auto wire = std::make_shared<Wire<End>>();
  wire->sides[0].machine = machine_;
  wire->sides[1].machine = numbers[0];
  auto near = std::make_unique<End>(hello, network_, wire, 0);
  auto far = std::make_unique<End>(hello, network_, wire, 1);
  if constexpr (std::is_same_v<End, SimData>) {
    if (network_.share_host(machine_, numbers[0])) {
      near->share_memory();
      far->share_memory();
    }
  }
  // What is sent on it meanwhile waits at its far end until that is accepted. (A planned event must be copyable.)
  const auto incoming = std::make_shared<std::unique_ptr<transport::IncomingConnection>>(
      std::make_unique<Incoming<End>>(hello, std::move(far)));
  // One after the other, as they are made: the control connection comes first.
  Time& arrives = last_connection_[numbers[0]];
  arrives = std::max(arrives, network_.arrival(machine_, 128));
  network_.events.at(arrives, [&network = network_, to = numbers[0], epoch = numbers[1], incoming] {
    network.come(to, epoch, std::move(*incoming));
  });
  return near;
}

std::unique_ptr<transport::ControlEndpoint> SimTransport::connect_control(const transport::ConnectRequest& request) {
  return connect<SimControl>(request, transport::Plane::kControl);
}
std::unique_ptr<transport::DataEndpoint> SimTransport::connect_data(const transport::ConnectRequest& request) {
  return connect<SimData>(request, transport::Plane::kData);
}

transport::ControlEndpoint* SimTransport::attach(std::unique_ptr<transport::ControlEndpoint> endpoint,
                                                 transport::ControlSink& sink) {
  endpoint->sink = &sink;
  controls_.emplace_back(static_cast<SimControl*>(endpoint.release()));
  return controls_.back().get();
}
transport::DataEndpoint* SimTransport::attach(std::unique_ptr<transport::DataEndpoint> endpoint,
                                              transport::DataSink& sink) {
  endpoint->sink = &sink;
  datas_.emplace_back(static_cast<SimData*>(endpoint.release()));
  datas_.back()->transport_ = this;
  return datas_.back().get();
}
transport::ControlEndpoint* SimTransport::accept_control(std::unique_ptr<transport::IncomingConnection> incoming,
                                                         transport::ControlSink& sink) {
  return attach(std::move(static_cast<Incoming<SimControl>&>(*incoming).end), sink);
}
transport::DataEndpoint* SimTransport::accept_data(std::unique_ptr<transport::IncomingConnection> incoming,
                                                   transport::DataSink& sink) {
  return attach(std::move(static_cast<Incoming<SimData>&>(*incoming).end), sink);
}

void SimTransport::close(transport::Endpoint* endpoint) {
  std::erase_if(controls_, [&](const auto& owned) { return owned.get() == endpoint; });
  std::erase_if(datas_, [&](const auto& owned) { return owned.get() == endpoint; });
}

int SimTransport::poll() {
  int found = 0;
  for (std::size_t i = 0; i < datas_.size(); ++i) found += datas_[i]->poll();
  for (std::size_t i = 0; i < controls_.size(); ++i) found += controls_[i]->poll();
  return found;
}

bool SimTransport::break_one() {
  const std::size_t all = controls_.size() + datas_.size();
  if (all == 0) return false;
  const std::size_t which = network_.random.below(all);
  if (which < controls_.size()) {
    controls_[which]->break_off("broken by the simulation");
  } else {
    datas_[which - controls_.size()]->break_off("broken by the simulation");
  }
  return true;
}

void SimTransport::hang_up() {
  for (const auto& one : controls_) one->abandon();
  for (const auto& one : datas_) one->abandon();
}

}  // namespace bps::sim
