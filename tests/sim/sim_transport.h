// SPDX-License-Identifier: Apache-2.0
// The transport of one process in one view, over a simulated network.
//
// It keeps the contract of transport.h and uses all of its freedom: no order between writes, bytes that become visible
// piece by piece at any time before their immediate, sources that are read at any time before their token comes back,
// windows that fill up, a loss that the two ends notice at different times. It is strict where callers must be: memory
// that has been withdrawn breaks the connection, and a write beyond its region ends the simulation.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "network.h"

namespace bps::sim {

class SimControl;
class SimData;

class SimTransport final : public transport::Transport {
 public:
  SimTransport(Network& network, Machine machine, Counters& counters);
  ~SimTransport() override;

  transport::Kind kind() const override { return transport::Kind::kTcp; }
  bool lands_in_order() const override { return network_.conditions.by_process; }
  transport::RegionPtr register_memory(std::span<std::byte> bytes) override;
  std::unique_ptr<transport::ControlEndpoint> connect_control(const transport::ConnectRequest& request) override;
  std::unique_ptr<transport::DataEndpoint> connect_data(const transport::ConnectRequest& request) override;
  transport::ControlEndpoint* attach(std::unique_ptr<transport::ControlEndpoint> endpoint,
                                     transport::ControlSink& sink) override;
  transport::DataEndpoint* attach(std::unique_ptr<transport::DataEndpoint> endpoint,
                                  transport::DataSink& sink) override;
  transport::ControlEndpoint* accept_control(std::unique_ptr<transport::IncomingConnection> incoming,
                                             transport::ControlSink& sink) override;
  transport::DataEndpoint* accept_data(std::unique_ptr<transport::IncomingConnection> incoming,
                                       transport::DataSink& sink) override;
  void close(transport::Endpoint* endpoint) override;
  int poll() override;
  bool arm() override { return true; }
  void disarm() override {}

  // Breaks a connection that is drawn. False when there is none.
  bool break_one();
  // What a kernel does for a process that has died: all connections end.
  void hang_up();
  // The region with this key, if it is still registered.
  transport::RegionPtr region(std::uint64_t key) const;
  Network& network() { return network_; }
  Machine machine() const { return machine_; }
  Counters& counters() { return counters_; }

 private:
  template <typename End>
  std::unique_ptr<End> connect(const transport::ConnectRequest& request, transport::Plane plane);

  Network& network_;
  const Machine machine_;
  Counters& counters_;
  std::uint64_t last_key_ = 0;
  std::map<std::uint64_t, std::weak_ptr<transport::Region>> regions_;
  std::map<Machine, Time> last_connection_;
  std::vector<std::unique_ptr<SimControl>> controls_;
  std::vector<std::unique_ptr<SimData>> datas_;
};

}  // namespace bps::sim
