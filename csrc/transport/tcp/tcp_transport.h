// SPDX-License-Identifier: Apache-2.0
// Connects processes anywhere: control messages go over one connection, data over others.
//
// A data endpoint is one TCP connection. A write is a frame: 32 bytes that name the region, then the bytes, which go
// straight from the source into the peer's region. The receiver checks every frame against the regions that it
// registered. Keys are random, so a region that was withdrawn is never mistaken for another one.
//
// The transport belongs to the thread of the loop, except connect_control() and connect_data().
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/event_loop.h"
#include "transport/socket_control.h"
#include "transport/tcp/tcp_rails.h"
#include "transport/transport.h"

namespace bps::transport::tcp {

class TcpData;

struct TcpOptions {
  std::string congestion;  // the congestion control of each data socket; "": the system's default
  // After this time the system asks the peer of a quiet data connection for a sign of life, which the peer's system
  // gives even for a stopped process. When none comes for as long again the connection ends. 0: it never asks.
  double quiet_s = 0;
};

class TcpTransport final : public Transport {
 public:
  // `rails` says where connections leave this host, if there are several.
  TcpTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, TcpOptions options,
               std::vector<TcpRail> rails = {});
  ~TcpTransport() override;

  Kind kind() const override { return Kind::kTcp; }
  RegionPtr register_memory(std::span<std::byte> bytes) override;
  // `address` is a text of to_text(TcpAddress).
  std::size_t rail_pairs(std::span<const std::byte> address) const override;
  bool fails_over() const override { return true; }
  bool lands_in_order() const override { return true; }
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

  using Regions = std::unordered_map<std::uint64_t, std::span<std::byte>>;

 private:
  struct Opened {
    Fd socket;
    Digest key;
    Rails rails;
  };
  Opened open_socket(const ConnectRequest& request, Plane plane) const;

  EventLoop& loop_;
  const Credentials& credentials_;
  Counters& counters_;
  const TcpOptions options_;
  const std::vector<TcpRail> rails_;
  std::shared_ptr<Regions> regions_;  // by key; shared with the regions, which remove themselves
  std::vector<std::unique_ptr<SocketControl>> controls_;
  std::vector<std::unique_ptr<TcpData>> datas_;
};

}  // namespace bps::transport::tcp
