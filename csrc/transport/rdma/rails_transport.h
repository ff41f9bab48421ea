// SPDX-License-Identifier: Apache-2.0
// Makes one transport of several rails: it has an RdmaTransport for each of them, on the same loop.
//
// Memory is registered with all of them, and has a key for each. An endpoint belongs to one.
#pragma once

#include <memory>
#include <vector>

#include "transport/rdma/rdma_transport.h"

namespace bps::transport::rdma {

class RailsTransport final : public Transport {
 public:
  // `transports[i]` is that of rail i. There must be one at least.
  explicit RailsTransport(std::vector<std::unique_ptr<RdmaTransport>> transports)
      : transports_(std::move(transports)) {}

  Kind kind() const override { return Kind::kRdma; }
  RegionPtr register_memory(std::span<std::byte> bytes) override;
  CallersMemory callers_memory() const override { return transports_.front()->callers_memory(); }
  bool takes_foreign() const override { return true; }
  RegionPtr register_foreign(const ForeignMemory& memory) override;
  std::size_t rail_pairs(std::span<const std::byte> address) const override;
  bool fails_over() const override { return true; }
  std::unique_ptr<ControlEndpoint> connect_control(const ConnectRequest& request) override;
  std::unique_ptr<DataEndpoint> connect_data(const ConnectRequest& request) override;
  ControlEndpoint* attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) override;
  DataEndpoint* attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) override;
  ControlEndpoint* accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) override;
  DataEndpoint* accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) override;
  void close(Endpoint* endpoint) override;
  int poll() override;
  bool arm() override;
  void disarm() override {}

 private:
  std::vector<std::shared_ptr<Registrations>> registrations() const;
  RdmaTransport& by(const Endpoint& endpoint) { return *transports_[endpoint.rails.here]; }
  RdmaTransport& by(const IncomingConnection& incoming);

  std::vector<std::unique_ptr<RdmaTransport>> transports_;
};

}  // namespace bps::transport::rdma
