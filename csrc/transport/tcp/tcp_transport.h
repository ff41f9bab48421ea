// SPDX-License-Identifier: Apache-2.0
// Processes anywhere: control messages over one connection, data over others.
//
// A data endpoint is one TCP connection. A write is a frame: 32 bytes that name the region, then the bytes, which go
// straight from the source into the peer's region. The receiver checks every frame against the regions it registered;
// keys are random, so a region that was withdrawn is never mistaken for another.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/event_loop.h"
#include "transport/socket_control.h"
#include "transport/transport.h"

namespace bps::transport::tcp {

class TcpData;

class TcpTransport final : public Transport {
 public:
  // `congestion`: congestion control of each data socket; empty for the system's default.
  TcpTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, std::string congestion);
  ~TcpTransport() override;

  std::string_view name() const override { return "tcp"; }
  RegionPtr register_memory(std::span<std::byte> bytes) override;
  // `address`: "host port".
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
  bool relies_on_descriptors() const override { return !controls_.empty() || !datas_.empty(); }

  static std::string make_address(const std::string& host, std::uint16_t port);

  using Regions = std::unordered_map<std::uint64_t, std::span<std::byte>>;

 private:
  Fd open_socket(const ConnectRequest& request, Plane plane, Digest& key) const;

  EventLoop& loop_;
  const Credentials& credentials_;
  Counters& counters_;
  const std::string congestion_;
  std::shared_ptr<Regions> regions_;  // by key; shared with the regions, which remove themselves
  std::vector<std::unique_ptr<SocketControl>> controls_;
  std::vector<std::unique_ptr<TcpData>> datas_;
};

}  // namespace bps::transport::tcp
