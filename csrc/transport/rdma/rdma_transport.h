// SPDX-License-Identifier: Apache-2.0
// Connects processes anywhere, by RDMA over one rail: two loops have one reliable queue pair for the control plane and
// several for data. See rails_transport.h for several rails.
//
// Each transport has a context of its own: a loop shares nothing of the device with another loop. Receives of data are
// shared by all queue pairs and are empty, since a write brings its own address; the immediate wakes the loop. Bytes
// are looked at only after that completion, so that writes may land in any order.
//
// Connections are in rdma_transport.cc, what goes wrong in rdma_events.cc, the hot part in rdma_data_path.cc.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "transport/rdma/endpoint_table.h"
#include "transport/rdma/rdma.h"

namespace bps::transport::rdma {

class RdmaTransport final : public Transport {
 public:
  RdmaTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, const Rail& rail,
                std::uint8_t rail_number, const RdmaOptions& options);
  ~RdmaTransport() override;

  Kind kind() const override { return Kind::kRdma; }
  RegionPtr register_memory(std::span<std::byte> bytes) override;
  CallersMemory callers_memory() const override { return callers_memory_; }
  bool takes_foreign() const override { return true; }
  RegionPtr register_foreign(const ForeignMemory& memory) override;
  const std::shared_ptr<Registrations>& registrations() const { return registrations_; }
  std::size_t rail_pairs(std::span<const std::byte> address) const override;
  bool fails_over() const override { return true; }
  // `address` is what RdmaListener::address() returns.
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
  std::shared_ptr<Context> context() const;
  RcConnection open(const ConnectRequest& request, Plane plane, Rails& rails);
  template <typename E, typename S>
  E* establish(std::unique_ptr<E> made, S& sink);
  template <typename E, typename S>
  E* accept(std::unique_ptr<IncomingConnection> incoming, S& sink);
  template <typename E>
  E* own(std::unique_ptr<E> endpoint);
  int take_completions(ibv_cq* cq);
  void dispatch(const ibv_wc& completion);

  void watch();
  void note_cm_events();
  void on_device_events();
  int tell_losses();
  void lose_device(const std::string& why);
  void let_go_of_device();

  EventLoop& loop_;
  const Credentials& credentials_;
  mutable std::mutex context_mutex_;  // callers on other threads take a share while the loop may let go of its own
  std::shared_ptr<Context> context_;  // null once the device is gone
  std::shared_ptr<Registrations> registrations_;
  const CallersMemory callers_memory_;
  TransportState state_;
  CmChannel channel_;
  CmId anchor_;  // bound to our address: shows that the connection manager knows it, and holds its view of the device
  std::string removal_;       // what the connection manager said when the device went
  std::string port_trouble_;  // the last bad news of the port, for reports of losses; "" when there is none
  EndpointTable endpoints_{state_};
  Timer device_check_;
  std::optional<Timer> silence_check_;  // set once there are paths
};

}  // namespace bps::transport::rdma
