// SPDX-License-Identifier: Apache-2.0
#include "node/connector.h"

#include <algorithm>
#include <exception>

#include "core/error.h"
#include "core/log.h"
#include "node/local_address.h"
#include "transport/local/self_transport.h"
#include "transport/tcp/tcp_rails.h"
#include "van/select.h"
#include "worker/worker.h"

namespace bps::node {

using transport::Kind;

namespace {

// One of several pairs of rails may take so long to connect. One that has failed with another node gets less time, and
// one that has worked with none gets the least: a job of many nodes must not wait for each of them.
constexpr double kTry_s = 10;
constexpr double kTryDoubtful_s = 2;
constexpr double kTryHopeless_s = 0.3;
// A pair that was lost may take so long to connect again; others of this process wait meanwhile. The connection manager
// of RDMA takes its time.
constexpr double kTryAgain_s = 1;
constexpr double kTryAgainRdma_s = 4;

}  // namespace

Connector::Connector(const ProcessOptions& options, const van::Membership& members, const van::Node& self,
                     const van::Hosts& hosts, Loops& loops)
    : options_(options), members_(members), places_(members), self_(self), hosts_(hosts), loops_(loops) {}

Connector::Target Connector::target_at(std::size_t index, std::size_t place) const {
  const bool is_relay = place >= places_.count();
  const std::uint32_t server = is_relay ? 0 : places_.server_of(place);
  const van::Node* node = is_relay ? members_.worker(hosts_.ranks(hosts_.host_of(
                                         static_cast<std::uint32_t>(self_.worker_rank)))[place - places_.count()])
                                   : members_.server(server);
  return {.server = *node,
          .place = place,
          .hello = {.node = self_.id,
                    .client_loop = static_cast<std::uint16_t>(index),
                    .server_loop = static_cast<std::uint16_t>(is_relay ? index : place - places_.first(server)),
                    .plane = transport::Plane::kControl}};
}

void Connector::connect(std::size_t index, std::size_t place, const Deadline& deadline) {
  const Kind kind = connect_to(loops_[index], target_at(index, place), deadline);
  const std::lock_guard lock(mutex_);
  routes_.push_back(kind);
}

std::vector<Kind> Connector::transports() const {
  const std::lock_guard lock(mutex_);
  return routes_;
}

Kind Connector::connect_to(Loop& loop, const Target& target, const Deadline& deadline) {
  const Kind kind = van::select_transport(options_.allowed, self_, target.server);
  if (kind == Kind::kSelf) {
    connect_self(loop, target, deadline);
    return kind;
  }
  if (kind != Kind::kRdma || !options_.allows(Kind::kTcp)) {
    connect_by(kind, loop, target, deadline);
    return kind;
  }
  try {
    // RDMA gets half of the time: the other half is for TCP.
    connect_by(kind, loop, target, Deadline::after(deadline.left_ms() / 2e3));
    return kind;
  } catch (const Error& error) {  // both have RDMA but cannot reach each other: most likely their fabrics are separate
    if (error.code() != ErrorCode::kUnreachable && error.code() != ErrorCode::kTransport) throw;
    log_warning(std::string(error.what()) + " (" + error.hint() + "); TCP is used instead");
  }
  connect_by(Kind::kTcp, loop, target, deadline);
  return Kind::kTcp;
}

void Connector::connect_self(Loop& loop, const Target& target, const Deadline& deadline) {
  loop.reactor->call([&] {
    auto* self = static_cast<transport::local::SelfTransport*>(loop.transport(Kind::kSelf));
    const transport::ConnectRequest request{
        .address = {}, .hello = target.hello, .deadline = deadline, .whom = target.server.describe()};
    worker::ServerConnection& server = add_server(loop, target, *self);
    transport::ControlEndpoint* control = self->attach(self->connect_control(request), server);
    loop.server_loop->accept(self->incoming(), self);
    transport::DataEndpoint* data = self->attach(self->connect_data(request), server);
    loop.server_loop->accept(self->incoming(), self);
    loop.worker_loop->open(server, control, {data});
  });
}

worker::ServerConnection& Connector::add_server(Loop& loop, const Target& target, transport::Transport& transport) {
  return loop.worker_loop->add_server(target.place, target.server.id, target.server.describe(), transport);
}

std::size_t Connector::data_connections(Kind kind) const {
  if (kind == Kind::kTcp) return options_.settings.transport.tcp_streams;
  if (kind == Kind::kRdma) return options_.rdma.data_queue_pairs;
  return 1;
}

// Another host's loopback address would lead to whatever listens here.
void Connector::require_reachable(const van::Node& server) const {
  if (van::share_loopback(self_, server)) return;
  const auto addresses = transport::tcp::parse_addresses(as_text(*van::address_of(server, Kind::kTcp)));
  if (!addresses) return;
  for (const transport::tcp::TcpAddress& one : *addresses) {
    if (is_loopback(one.host)) {
      throw Error(ErrorCode::kUnreachable,
                  server.describe() + " is on another host, and has told only " + one.host + " of itself",
                  "set BPS_INTERFACE there, or BPS_NODE_HOST to an address that all hosts reach");
    }
  }
}

void Connector::connect_by(Kind kind, Loop& loop, const Target& target, const Deadline& deadline) {
  if (kind == Kind::kTcp) require_reachable(target.server);
  transport::Transport* transport = loop.transport(kind);
  const transport::ConnectRequest request = request_for(kind, target, deadline);
  // Connecting blocks, so it happens here and not on the loop, which must go on accepting connections.
  std::vector<MadePath> made = connect_rails(*transport, request, target.server.id, data_connections(kind));
  std::vector<std::size_t> missing;
  for (std::size_t pair = 0; made.front().id != 0 && pair < transport->rail_pairs(request.address); ++pair) {
    if (std::ranges::find(made, pair, &MadePath::pair) == made.end()) missing.push_back(pair);
  }
  loop.reactor->call([&] {
    worker::ServerConnection& server = add_server(loop, target, *transport);
    server.reached_by = transport::to_string(kind);
    if (kind == Kind::kTcp) server.reached_by += ", " + transport::tcp::in_words(as_text(request.address));
    std::vector<worker::ServerPath> attached;
    for (MadePath& path : made) attached.push_back(attach(std::move(path), *transport, server));
    loop.worker_loop->open(server, std::move(attached));
  });
  for (const std::size_t pair : missing) restore(target.hello.client_loop, target.place, pair);
}

transport::ConnectRequest Connector::request_for(Kind kind, const Target& target, const Deadline& deadline) {
  return {.address = *van::address_of(target.server, kind),
          .hello = target.hello,
          .deadline = deadline,
          .whom = target.server.describe()};
}

// Runs on the loop.
worker::ServerPath Connector::attach(MadePath made, transport::Transport& transport, worker::ServerConnection& server) {
  worker::ServerPath path{.id = made.id, .pair = made.pair};
  for (auto& endpoint : made.data) path.data.push_back(transport.attach(std::move(endpoint), server));
  path.control = transport.attach(std::move(made.control), server);
  return path;
}

void Connector::connect_pair(transport::Transport& transport, const transport::ConnectRequest& request,
                             std::size_t streams, MadePath& path) {
  transport::ConnectRequest one = request;
  one.hello.path = path.id;
  one.connection = path.pair;
  if (!path.control) path.control = transport.connect_control(one);
  for (std::size_t i = 0; i < streams; ++i) {
    if (path.id != 0) one.hello.stream = static_cast<std::uint16_t>(i);
    path.data.push_back(transport.connect_data(one));
  }
}

// Makes about `wanted` data connections: as many over each pair of rails, and at least one. Rails by which the peer
// cannot be reached are left out, as long as others can reach it. Each pair has a control connection of its own where
// it is a path; else all of them together have one.
std::vector<Connector::MadePath> Connector::connect_rails(transport::Transport& transport,
                                                          transport::ConnectRequest request, std::uint32_t node,
                                                          std::size_t wanted) {
  const std::size_t pairs = transport.rail_pairs(request.address);
  const std::size_t per_pair = std::max<std::size_t>(1, wanted / pairs);
  const bool are_paths = pairs > 1 && transport.fails_over();
  const Deadline deadline = request.deadline;
  std::vector<MadePath> made;
  std::exception_ptr failure;
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    const double most_s = pairs == 1 ? deadline.left_ms() / 1e3 : patience(node, pair);
    if (most_s == 0 && !made.empty()) continue;
    request.deadline = pairs == 1 ? deadline : Deadline::after(std::min(deadline.left_ms() / 2e3, most_s));
    try {
      MadePath path;
      if (are_paths) {
        path.id = static_cast<std::uint16_t>(pair + 1);
      } else if (!made.empty()) {
        path = std::move(made.back());
        made.pop_back();
      }
      path.pair = pair;
      try {
        connect_pair(transport, request, per_pair, path);
      } catch (...) {
        if (!are_paths && !path.data.empty()) made.push_back(std::move(path));  // what was connected stays
        throw;
      }
      made.push_back(std::move(path));
      note(node, pair, nullptr);
    } catch (const Error& error) {
      const bool unreachable = error.code() == ErrorCode::kUnreachable || error.code() == ErrorCode::kTransport ||
                               error.code() == ErrorCode::kTimeout;
      if (pairs == 1 || !unreachable) throw;
      failure = std::current_exception();
      note(node, pair, &error);
    }
  }
  if (made.empty()) std::rethrow_exception(failure);
  return made;
}

// ---- Paths that are lost

void Connector::restore(std::size_t index, std::size_t place, std::size_t pair) {
  retries_.add({index, place, pair}, [this, index, place, pair] { return try_restore(index, place, pair); });
}

// Runs on the thread of the retries. Returns true when the pair need not be tried again.
bool Connector::try_restore(std::size_t index, std::size_t place, std::size_t pair) {
  Loop& loop = loops_[index];
  const auto find = [&] { return loop.worker_loop->find_server(place); };
  transport::Transport* by = nullptr;
  loop.reactor->call([&] {
    if (worker::ServerConnection* server = find()) by = &server->memory.transport();
  });
  if (by == nullptr) return true;  // the server itself is lost
  transport::Transport& transport = *by;
  const Kind kind = transport.kind();
  const Target target = target_at(index, place);
  const double most_s = kind == Kind::kRdma ? kTryAgainRdma_s : kTryAgain_s;
  const transport::ConnectRequest request = request_for(kind, target, Deadline::after(most_s));
  const std::size_t pairs = transport.rail_pairs(request.address);
  // Numbers come again after days of failures, when the path that had them has long been forgotten.
  std::uint16_t id = 0;
  while (id <= pairs) id = ++latest_path_;
  MadePath made{.id = id, .pair = pair};
  try {
    connect_pair(transport, request, std::max<std::size_t>(1, data_connections(kind) / pairs), made);
  } catch (const Error& error) {
    log_info(std::string("a lost rail is not back: ") + error.what());
    return false;
  }
  loop.reactor->call([&] {
    if (worker::ServerConnection* server = find()) {
      loop.worker_loop->add_path(*server, attach(std::move(made), transport, *server));
    }
  });
  return true;
}

// Returns for how many seconds to try one of several pairs of rails; 0: it has failed with this node before.
double Connector::patience(std::uint32_t node, std::size_t pair) const {
  const std::lock_guard lock(mutex_);
  const auto known = rails_tried_.find(pair);
  if (known == rails_tried_.end() || known->second.failed.empty()) return kTry_s;
  if (known->second.failed.contains(node)) return 0;
  return known->second.works ? kTryDoubtful_s : kTryHopeless_s;
}

void Connector::note(std::uint32_t node, std::size_t pair, const Error* failure) {
  const std::lock_guard lock(mutex_);
  RailsTried& tried = rails_tried_[pair];
  if (failure == nullptr) {
    tried.works = true;
  } else if (tried.failed.insert(node).second) {
    log_warning(std::string(failure->what()) + " (" + failure->hint() + "); the other rails are used");
  }
}

}  // namespace bps::node
