// SPDX-License-Identifier: Apache-2.0
// What a process has in one view: its loops, its transport, its connections to the servers, and its tensors. The real
// classes, composed as node::Process composes them, but without threads: turn() is what their reactor would do.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "placements.h"
#include "server/server_loop.h"
#include "shape.h"
#include "sim_transport.h"
#include "tensor/key_map.h"
#include "transport/reactor.h"
#include "van/hosts.h"
#include "van/membership.h"
#include "worker/worker_loop.h"

namespace bps::sim {

class View {
 public:
  // `machine_of`: where each node of the membership runs.
  View(const Shape& shape, Network& network, const van::Membership& membership, std::uint32_t self,
       const std::vector<Machine>& machine_of);
  ~View();

  // True when there was anything to do.
  bool turn();
  // Has work that no event announces.
  bool blocked() const;
  Time next_timer() { return reactor.loop().next_due(); }
  void accept(std::unique_ptr<transport::IncomingConnection> incoming);

  // Server loops that an operation may have parts at, the relays of this host among them.
  std::uint32_t places() const;
  std::uint32_t epoch() const { return membership.epoch; }
  std::uint32_t rank() const { return static_cast<std::uint32_t>(self.worker_rank); }
  // Landing slots that the worker holds, of all servers.
  std::size_t slots() const;
  bool has_slots() const;  // of each server
  // A tensor of so many elements of 32 bits, in the group of all ranks.
  std::shared_ptr<worker::Tensor> make_tensor(std::uint32_t id, std::string name, std::uint64_t elements) const;

  const van::Membership membership;
  const tensor::KeyMapConfig keys;
  const van::Hosts hosts;
  const van::Node& self;
  transport::Reactor reactor{"sim", transport::Spin{}};
  SimTransport transport;
  std::shared_ptr<const van::Group> all;
  std::shared_ptr<worker::ViewEnd> end = std::make_shared<worker::ViewEnd>();
  std::unique_ptr<server::ServerLoop> server_loop;
  std::unique_ptr<worker::WorkerLoop> worker_loop;
  std::vector<worker::ServerConnection*> servers;
  std::vector<std::shared_ptr<worker::Tensor>> tensors;
  std::unique_ptr<Placements> placements;  // of a worker whose servers may get other weights

 private:
  void make_worker(const std::vector<Machine>& machine_of);
  void connect(std::uint32_t place, const van::Node& node, Machine machine);
  bool needs_relay() const;
  std::uint32_t place_of_relay(std::uint32_t rank) const;
  worker::Part part(std::uint32_t id, std::uint32_t partition, std::uint32_t& place) const;

  const Shape& shape_;
  Network& network_;
  const Machine machine_;
};

}  // namespace bps::sim
