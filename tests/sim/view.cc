// SPDX-License-Identifier: Apache-2.0
#include "view.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>

namespace bps::sim {

View::View(const Shape& shape, Network& network, const van::Membership& members, std::uint32_t id,
           const std::vector<Machine>& machine_of)
    : membership(members),
      keys{.servers = members.servers, .slots = members.server_of_slot()},
      hosts(membership),
      self(*membership.by_id(id)),
      transport(network, machine_of[id - 1], reactor.counters()),
      shape_(shape),
      network_(network),
      machine_(machine_of[id - 1]) {
  van::Group group{0, std::vector<std::uint32_t>(membership.workers)};
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  all = std::make_shared<const van::Group>(std::move(group));
  if (self.server_rank >= 0 || hosts.active()) {
    server::ServerLoopOptions options{.window = shape.window, .largest_partition = 1 << 20};
    options.slot_memory = shape.slot_memory;
    options.epoch = epoch();
    options.node = self.id;
    options.reactor = &reactor;
    server_loop = std::make_unique<server::ServerLoop>(
        options, membership, std::vector<transport::Transport*>{&transport}, reactor.counters());
    server_loop->add_group(*all);
  }
  if (self.worker_rank >= 0) make_worker(machine_of);
}

View::~View() {
  network_.stop_listening(machine_, epoch());
}

void View::make_worker(const std::vector<Machine>& machine_of) {
  worker::WorkerLoopOptions options;
  options.places = places();
  options.scheduling_credit = shape_.credit;
  options.largest_partition = shape_.partition_bytes;
  options.staging_bytes = 4 * shape_.partition_bytes;
  options.survives_servers = shape_.failover;
  options.epoch = epoch();
  options.silence_s = std::chrono::duration<double>(shape_.silence).count();
  worker_loop = std::make_unique<worker::WorkerLoop>(options, reactor);
  std::map<std::uint32_t, const van::Node*> needed;  // by place
  for (std::uint32_t server = 0; server < membership.servers; ++server) {
    if (!needs_relay() || hosts.relays(rank(), server)) needed[server] = membership.server(server);
  }
  if (hosts.active()) {
    worker_loop->relay_for(&server_loop->relay_by(worker_loop->relay()));
    for (const std::uint32_t local : hosts.ranks(hosts.host_of(rank()))) {
      needed[place_of_relay(local)] = membership.worker(local);
    }
  }
  for (const auto& [place, node] : needed) connect(place, *node, machine_of[node->id - 1]);
  if (!shape_.shifts.empty()) placements = std::make_unique<Placements>(membership, hosts, rank());
  for (std::uint32_t i = 0; i < shape_.tensors.size(); ++i) {
    tensors.push_back(make_tensor(i + 1, "t" + std::to_string(i), shape_.tensors[i].elements));
  }
}

void View::connect(std::uint32_t place, const van::Node& node, Machine machine) {
  transport::ConnectRequest request{
      .address = {}, .hello = {.node = self.id}, .deadline = Deadline::never(), .whom = "server"};
  const Bytes address = address_of(machine, epoch());
  request.address = address;
  worker::ServerConnection& server =
      worker_loop->add_server(place, node.id, "server " + std::to_string(place), transport);
  transport::ControlEndpoint* control = transport.attach(transport.connect_control(request), server);
  std::vector<transport::DataEndpoint*> data;
  for (std::size_t i = 0; i < shape_.data_connections; ++i) {
    data.push_back(transport.attach(transport.connect_data(request), server));
  }
  worker_loop->open(server, control, data);
  servers.push_back(&server);
}

std::uint32_t View::places() const {
  const bool are_apart = hosts.active() && shape_.dedicated;  // relays, from servers
  return membership.servers + (are_apart ? static_cast<std::uint32_t>(hosts.ranks(hosts.host_of(rank())).size()) : 0);
}

// The host of this rank has others, with which it sums first.
bool View::needs_relay() const {
  return hosts.active() && hosts.ranks(hosts.host_of(rank())).size() > 1;
}

std::uint32_t View::place_of_relay(std::uint32_t rank) const {
  if (!shape_.dedicated) return static_cast<std::uint32_t>(membership.worker(rank)->server_rank);
  return membership.servers + hosts.local_index(rank);
}

// Where a partition of this tensor goes: as Worker::plan() says.
worker::Part View::part(std::uint32_t id, std::uint32_t partition, std::uint32_t& place) const {
  const auto slot = static_cast<std::uint32_t>(mix((id - 1) * 1000 + partition) % keys.slots.size());
  place = tensor::owner_of(keys, slot, id, partition);
  if (!needs_relay()) return {partition};
  const std::uint32_t hash = tensor::relay_hash(tensor::spread_of(id, partition));
  return {partition, std::exchange(place, place_of_relay(hosts.relay(hosts.host_of(rank()), place, hash)))};
}

std::shared_ptr<worker::Tensor> View::make_tensor(std::uint32_t id, std::string name, std::uint64_t elements) const {
  constexpr std::uint32_t kElement = 4;
  const std::uint64_t bytes = elements * kElement;
  auto made = std::make_shared<worker::Tensor>(
      tensor::Partitioning(bytes, kElement, shape_.partition_bytes),
      tensor::Partitioning(bytes, kElement, shape_.partition_bytes, membership.workers));
  made->name = std::move(name);
  made->id = id;
  made->group = all;
  made->is_on_one_host = true;  // or so it seems
  made->view_end = end;
  made->position = static_cast<std::uint16_t>(self.worker_rank);
  made->dtype = Dtype::kInt32;
  made->bytes = bytes;
  const auto plan = [&](const tensor::Partitioning& cut) {
    worker::Plan made_plan(places());
    for (std::uint32_t i = 0; i < cut.count(); ++i) {
      std::uint32_t place = 0;
      const worker::Part made_part = part(id, i, place);
      made_plan[place].push_back(made_part);
    }
    return made_plan;
  };
  if (placements) {
    made->plans = placements->first(*made);
    return made;
  }
  made->plans.whole = plan(made->whole);
  made->plans.sharded = plan(made->sharded);
  return made;
}

void View::accept(std::unique_ptr<transport::IncomingConnection> incoming) {
  if (server_loop) server_loop->accept(std::move(incoming), &transport);
}

bool View::turn() {
  bool found = reactor.loop().run_due() > 0;
  found |= transport.poll() > 0;
  if (server_loop) found |= server_loop->step();
  if (worker_loop) found |= worker_loop->step();
  return found;
}

bool View::blocked() const {
  return (server_loop && server_loop->blocked()) || (worker_loop && worker_loop->blocked());
}

std::size_t View::slots() const {
  std::size_t count = 0;
  for (const worker::ServerConnection* server : servers) count += server->slots.small() + server->slots.large();
  return count;
}

bool View::has_slots() const {
  return std::ranges::all_of(servers,
                             [](const auto* server) { return server->slots.small() + server->slots.large() > 0; });
}

}  // namespace bps::sim
