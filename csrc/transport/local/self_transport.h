// SPDX-License-Identifier: Apache-2.0
// Connects a process to its own server: both ends live on one loop, so a posting is only a pointer in a queue.
//
// connect_control() and connect_data() return the caller's end, and leave the other end in incoming(), from where it is
// accepted like any other connection. The transport belongs to one thread. Queues keep their capacity, so that steady
// traffic allocates nothing.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace bps::transport::local {

class SelfControl;
class SelfData;

class SelfTransport : public Transport {
 public:
  explicit SelfTransport(Counters& counters);
  ~SelfTransport() override;

  // Returns the other end of the connection that was made last, or null when it has been taken.
  std::unique_ptr<IncomingConnection> incoming();

  Kind kind() const override { return Kind::kSelf; }
  RegionPtr register_memory(std::span<std::byte> bytes) override;
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
  Counters& counters_;
  std::unique_ptr<IncomingConnection> incoming_;
  std::vector<std::unique_ptr<SelfControl>> controls_;
  std::vector<std::unique_ptr<SelfData>> datas_;
};

}  // namespace bps::transport::local
