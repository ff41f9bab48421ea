// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/rails_transport.h"

#include <algorithm>

#include "transport/rdma/rdma_listener.h"

namespace bps::transport::rdma {

std::vector<std::shared_ptr<Registrations>> RailsTransport::registrations() const {
  std::vector<std::shared_ptr<Registrations>> all;
  for (const auto& transport : transports_) all.push_back(transport->registrations());
  return all;
}

RegionPtr RailsTransport::register_memory(std::span<std::byte> bytes) {
  return std::make_shared<RdmaRegion>(bytes, registrations());
}

RegionPtr RailsTransport::register_foreign(const ForeignMemory& memory) {
  return std::make_shared<RdmaRegion>(memory, registrations());
}

std::size_t RailsTransport::rail_pairs(std::span<const std::byte> address) const {
  return std::max(transports_.size(), transports_.front()->rail_pairs(address));
}

std::unique_ptr<ControlEndpoint> RailsTransport::connect_control(const ConnectRequest& request) {
  return transports_[request.connection % transports_.size()]->connect_control(request);
}

std::unique_ptr<DataEndpoint> RailsTransport::connect_data(const ConnectRequest& request) {
  return transports_[request.connection % transports_.size()]->connect_data(request);
}

ControlEndpoint* RailsTransport::attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) {
  RdmaTransport& transport = by(*endpoint);
  return transport.attach(std::move(endpoint), sink);
}

DataEndpoint* RailsTransport::attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) {
  RdmaTransport& transport = by(*endpoint);
  return transport.attach(std::move(endpoint), sink);
}

RdmaTransport& RailsTransport::by(const IncomingConnection& incoming) {
  return *transports_[static_cast<const RdmaIncoming&>(incoming).rail % transports_.size()];
}

ControlEndpoint* RailsTransport::accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) {
  RdmaTransport& transport = by(*incoming);
  return transport.accept_control(std::move(incoming), sink);
}

DataEndpoint* RailsTransport::accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) {
  RdmaTransport& transport = by(*incoming);
  return transport.accept_data(std::move(incoming), sink);
}

void RailsTransport::close(Endpoint* endpoint) {
  by(*endpoint).close(endpoint);
}

int RailsTransport::poll() {
  int found = 0;
  for (const auto& transport : transports_) found += transport->poll();
  return found;
}

bool RailsTransport::arm() {
  // All rails are armed, whatever the first ones answer: a rail that is not armed wakes nobody.
  bool quiet = true;
  for (const auto& transport : transports_) quiet = transport->arm() && quiet;
  return quiet;
}

std::unique_ptr<Transport> make_rdma_transport(EventLoop& loop, const Credentials& credentials, Counters& counters,
                                               const std::vector<Rail>& rails, const RdmaOptions& options) {
  std::vector<std::unique_ptr<RdmaTransport>> transports;
  for (const Rail& rail : rails) {
    const auto number = static_cast<std::uint8_t>(transports.size());
    try {
      transports.push_back(std::make_unique<RdmaTransport>(loop, credentials, counters, rail, number, options));
    } catch (const Error& error) {
      throw RailError(number, error);
    }
  }
  if (transports.size() == 1) return std::move(transports.front());
  return std::make_unique<RailsTransport>(std::move(transports));
}

}  // namespace bps::transport::rdma
