// SPDX-License-Identifier: Apache-2.0
#include "transport/local/self_transport.h"

#include <algorithm>

#include "transport/local/self_endpoints.h"

namespace bps::transport::local {
namespace {

class SelfRegion final : public Region {
 public:
  explicit SelfRegion(std::span<std::byte> bytes) : Region(bytes) {
    origin_ = reinterpret_cast<std::uint64_t>(bytes.data());
  }
};

template <typename Half>
class IncomingHalf final : public IncomingConnection {
 public:
  explicit IncomingHalf(std::unique_ptr<Half> by) : IncomingConnection(by->hello), half(std::move(by)) {}
  std::unique_ptr<Half> half;
};

template <typename Half>
std::unique_ptr<Half> make_pair(const Hello& hello, Counters& counters, std::unique_ptr<IncomingConnection>& incoming) {
  auto near = std::make_unique<Half>(hello, counters);
  auto far = std::make_unique<Half>(hello, counters);
  Half::join(*near, *far);
  incoming = std::make_unique<IncomingHalf<Half>>(std::move(far));
  return near;
}

}  // namespace

SelfTransport::SelfTransport(Counters& counters) : counters_(counters) {}
SelfTransport::~SelfTransport() = default;

RegionPtr SelfTransport::register_memory(std::span<std::byte> bytes) {
  return std::make_shared<SelfRegion>(bytes);
}

std::unique_ptr<IncomingConnection> SelfTransport::incoming() {
  return std::move(incoming_);
}

std::unique_ptr<ControlEndpoint> SelfTransport::connect_control(const ConnectRequest& request) {
  return make_pair<SelfControl>(request.hello_for(Plane::kControl), counters_, incoming_);
}
std::unique_ptr<DataEndpoint> SelfTransport::connect_data(const ConnectRequest& request) {
  return make_pair<SelfData>(request.hello_for(Plane::kData), counters_, incoming_);
}

ControlEndpoint* SelfTransport::attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) {
  endpoint->sink = &sink;
  controls_.emplace_back(static_cast<SelfControl*>(endpoint.release()));
  return controls_.back().get();
}
DataEndpoint* SelfTransport::attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) {
  endpoint->sink = &sink;
  datas_.emplace_back(static_cast<SelfData*>(endpoint.release()));
  return datas_.back().get();
}

ControlEndpoint* SelfTransport::accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) {
  return attach(std::move(static_cast<IncomingHalf<SelfControl>&>(*incoming).half), sink);
}
DataEndpoint* SelfTransport::accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) {
  return attach(std::move(static_cast<IncomingHalf<SelfData>&>(*incoming).half), sink);
}

void SelfTransport::close(Endpoint* endpoint) {
  std::erase_if(controls_, [&](const auto& owned) { return owned.get() == endpoint; });
  std::erase_if(datas_, [&](const auto& owned) { return owned.get() == endpoint; });
}

int SelfTransport::poll() {
  int delivered = 0;
  for (std::size_t i = 0; i < datas_.size(); ++i) delivered += datas_[i]->deliver();
  for (std::size_t i = 0; i < controls_.size(); ++i) delivered += controls_[i]->deliver();
  return delivered;
}

bool SelfTransport::arm() {
  return std::ranges::all_of(datas_, [](const auto& one) { return one->idle(); }) &&
         std::ranges::all_of(controls_, [](const auto& one) { return one->idle(); });
}

}  // namespace bps::transport::local
