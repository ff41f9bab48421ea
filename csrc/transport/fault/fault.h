// SPDX-License-Identifier: Apache-2.0
// Decorates a transport so that it misbehaves within its contract, and sometimes beyond it.
//
// Within its contract it accepts only part of a batch, refuses for a while, and holds writes back and delivers them in
// another order. What is built on a transport must bear that without a trace. Beyond its contract it loses a data
// endpoint after a number of writes. What is built on it must turn that into an error. It promises less than what it
// decorates: because writes overtake each other they do not land in order, and paths cannot be lost one by one
// (Transport::fails_over). The same seed gives the same faults. It is for tests; BPS_FAULT switches it on in a process.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace bps::transport::fault {

struct FaultPlan {
  std::uint32_t seed = 1;
  double refuse = 0;             // the chance that a post accepts nothing
  double partial = 0;            // the chance that it accepts a random prefix
  double hold = 0;               // the chance that an accepted write or post is held back and overtaken
  std::uint64_t lose_after = 0;  // data writes and postings after which an endpoint is lost; 0: never

  bool any() const { return refuse > 0 || partial > 0 || hold > 0 || lose_after > 0; }
  // Reads "refuse=0.1,hold=0.5,seed=7"; empty text means no faults. Throws kInvalidArgument.
  static FaultPlan parse(const std::string& text);
};

class FaultData;

class FaultTransport final : public Transport {
 public:
  FaultTransport(std::unique_ptr<Transport> inner, FaultPlan plan);
  ~FaultTransport() override;

  Kind kind() const override { return inner_->kind(); }
  RegionPtr register_memory(std::span<std::byte> bytes) override { return inner_->register_memory(bytes); }
  CallersMemory callers_memory() const override { return inner_->callers_memory(); }
  bool takes_foreign() const override { return inner_->takes_foreign(); }
  RegionPtr register_foreign(const ForeignMemory& memory) override { return inner_->register_foreign(memory); }
  std::size_t rail_pairs(std::span<const std::byte> address) const override { return inner_->rail_pairs(address); }
  std::unique_ptr<ControlEndpoint> connect_control(const ConnectRequest& request) override;
  std::unique_ptr<DataEndpoint> connect_data(const ConnectRequest& request) override;
  ControlEndpoint* attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) override;
  DataEndpoint* attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) override;
  ControlEndpoint* accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) override;
  DataEndpoint* accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) override;
  void close(Endpoint* endpoint) override;
  int poll() override;
  bool arm() override;
  void disarm() override { inner_->disarm(); }
  bool relies_on_descriptors() const override { return inner_->relies_on_descriptors(); }

 private:
  std::unique_ptr<Transport> inner_;
  const FaultPlan plan_;
  std::uint32_t endpoints_made_ = 0;
  std::vector<std::unique_ptr<FaultData>> datas_;  // control endpoints are passed through
};

}  // namespace bps::transport::fault
