// SPDX-License-Identifier: Apache-2.0
#include "server/server_loop.h"

#include <algorithm>
#include <utility>

#include "core/log.h"

namespace bps::server {

namespace {

Location locate(std::uint32_t id, const van::Membership& members, const van::Hosts& hosts) {
  const van::Node* node = members.by_id(id);
  Location location;
  if (node == nullptr) return location;
  if (node->server_rank >= 0) location.server_rank = static_cast<std::uint32_t>(node->server_rank);
  if (node->worker_rank >= 0) location.host = hosts.host_of(static_cast<std::uint32_t>(node->worker_rank));
  return location;
}

std::string describe(std::uint32_t id, const van::Membership& members) {
  const van::Node* node = members.by_id(id);
  return node == nullptr ? "this server" : node->describe();
}

}  // namespace

ServerLoop::ServerLoop(ServerLoopOptions options, const van::Membership& membership,
                       std::vector<transport::Transport*> slot_transports, Counters& counters)
    : options_(options),
      membership_(membership),
      hosts_(membership_),
      counters_(counters),
      pool_(std::move(slot_transports), options_.reactor),
      rounds_({.largest_partition = options.largest_partition,
               .epoch = options.epoch,
               .here = locate(options.node, membership_, hosts_),
               .name = describe(options.node, membership_),
               .table = options_.table,
               .kept_bytes = options.kept_memory / std::max(membership_.workers, 1U)},
              hosts_, sessions_, pool_, counters) {}

// ---- Sessions

// Returns the session to which a hello belongs, or null where none may have this connection.
WorkerSession* ServerLoop::admit(const transport::Hello& hello, transport::Transport& transport) {
  const auto found = std::ranges::find_if(sessions_, [&](const auto& session) {
    return session->client.node == hello.node && session->client.worker_loop == hello.client_loop;
  });
  if (found == sessions_.end()) {
    const van::Node* node = membership_.by_id(hello.node);
    if (node == nullptr || node->worker_rank < 0) {
      log_warning("rejected a connection: node " + std::to_string(hello.node) + " is not a worker of this job");
      return nullptr;
    }
    if (hello.client_loop >= node->worker_loops) {
      log_warning("rejected a connection of " + node->describe() + ": it names worker loop " +
                  std::to_string(hello.client_loop) + " of " + std::to_string(node->worker_loops));
      return nullptr;
    }
    const SessionContext context{*this, rounds_, pool_, sends_due_, counters_, options_.epoch};
    ++clients_;
    return sessions_.emplace_back(std::make_unique<WorkerSession>(context, *node, hello.client_loop, transport)).get();
  }
  if ((*found)->is_lost()) {
    log_warning("rejected a connection of " + (*found)->client.name + ", which is lost");
    return nullptr;
  }
  if (&(*found)->transport() != &transport) {  // each transport knows connections of its own only
    log_warning("rejected a connection of " + (*found)->client.name + ", which is connected by another transport");
    return nullptr;
  }
  if (!(*found)->may_accept(hello)) {
    log_warning("rejected a connection that claims to be " + (*found)->client.name +
                ", whose connections are complete");
    return nullptr;
  }
  return found->get();
}

void ServerLoop::accept(std::unique_ptr<transport::IncomingConnection> incoming, transport::Transport* transport) {
  WorkerSession* session = admit(incoming->hello, *transport);
  if (session == nullptr) return;
  session->accept(std::move(incoming));
  if (path_check_ || !session->fails_over() || options_.reactor == nullptr) return;
  path_check_ = options_.reactor->loop().every(transport::kPathCheck_s, [this] { check_paths(); });
}

void ServerLoop::on_message(WorkerSession& session, std::span<const std::byte> message) {
  const auto decoded = tensor::decode(message, options_.epoch);
  if (!decoded) {
    counters_.stale.add();
    log_warning(session.client.name + " sent a malformed control message, which was ignored");
    return;
  }
  if (const auto* attached = std::get_if<tensor::Attach>(&*decoded)) {
    attach(session, *attached);
  } else if (const auto* cancel = std::get_if<tensor::Cancel>(&*decoded)) {
    session.send(rounds_.cancel(session, *cancel));
  } else if (const auto* ping = std::get_if<tensor::Ping>(&*decoded)) {
    session.send(tensor::Echo{ping->number});
  } else if (const auto* received = std::get_if<tensor::Received>(&*decoded)) {
    session.confirm(*received);
  } else if (const auto* keys = std::get_if<tensor::AnswerKeys>(&*decoded)) {
    session.add_keys(*keys);
  } else if (const auto* lost = std::get_if<tensor::PathLost>(&*decoded)) {
    settle(session, *lost);
  } else if (const auto* landed = std::get_if<tensor::Landed>(&*decoded)) {
    rounds_.on_landed(session, landed->immediates);
  }
}

void ServerLoop::attach(WorkerSession& session, const tensor::Attach& attach) {
  if (attach.largest_payload > options_.largest_partition || !session.attach(attach)) return;
  if (attach.wants_log) share_log(session);
  if (!attach.needs_slots) return;
  if (!pool_.serves(session.transport())) {
    counters_.stale.add();
    log_warning(session.client.name +
                " asks for landing slots although it shares memory with this server; it gets none");
    return;
  }
  // Each worker gets the same share of the memory. 0 would mean that there is no limit.
  const std::uint64_t memory =
      options_.slot_memory == 0 ? 0
                                : std::max<std::uint64_t>(1, options_.slot_memory / std::max(membership_.workers, 1U));
  try {
    session.window().open(attach.largest_payload, options_.window, memory);
  } catch (const Error& error) {
    reject(session, error);
  }
}

// Shares the redo log. Without memory for it, its members are served as those that share no memory.
void ServerLoop::share_log(WorkerSession& session) {
  transport::DirectAccess* direct = session.direct();
  if (direct == nullptr) return;
  try {
    if (!shared_log_.log) {
      shared_log_.memory = transport::shm::SharedMemory::create(tensor::RedoLog::bytes());
      shared_log_.log = std::make_unique<tensor::RedoLog>(shared_log_.memory->bytes());
    }
    transport::RegionPtr& region = shared_log_.regions[&session.transport()];
    if (!region) region = session.transport().register_memory(shared_log_.memory->bytes());
    if (!direct->share(*region)) return;
    rounds_.log_to(shared_log_.log.get());
    const transport::RemoteSpan all = region->remote(0, region->bytes().size());
    session.send(tensor::RedoLogAt{all.key, all.address, all.length});
  } catch (const Error& error) {
    log_warning("cannot keep a redo log for " + session.client.name + ": " + error.what());
  }
}

// ---- Several paths

void ServerLoop::settle(WorkerSession& session, const tensor::PathLost& lost) {
  std::vector<transport::Endpoint*> closed = session.settle(lost);
  if (closed.empty() || options_.reactor == nullptr) return;  // without a loop they stay until their transport goes
  options_.reactor->loop().post([&transport = session.transport(), closed = std::move(closed)] {
    for (transport::Endpoint* endpoint : closed) transport.close(endpoint);
  });
}

void ServerLoop::check_paths() {
  for (const auto& session : sessions_) {
    if (session->fails_over()) session->check_paths();
  }
}

// ---- Losses

// Rejects a worker when there is no memory for its slots, or the memory cannot be registered.
void ServerLoop::reject(WorkerSession& session, const Error& error) {
  log_warning("cannot serve " + session.client.name + ": " + error.what() + " (" + error.hint() + ")");
  session.send(tensor::PushFailed{tensor::kWholeSession, error.code(), error.what(), error.hint()});
  session.abandon(true);  // the control endpoint still has to say so
  lose_node(session.client.node, "server cannot serve " + session.client.name + ": " + error.what());
}

void ServerLoop::lose_node(std::uint32_t node, const std::string& why) {
  for (const auto& session : sessions_) {
    if (session->client.node == node && !session->is_lost()) session->abandon(false);
  }
  count_clients();
  if (const van::Node* gone = membership_.by_id(node); gone != nullptr && gone->worker_rank >= 0) {
    rounds_.gone().lose(static_cast<std::uint32_t>(gone->worker_rank), why);
  }
  losses_due_ = true;
}

void ServerLoop::count_clients() {
  const auto lost = std::ranges::count_if(sessions_, [](const auto& session) { return session->is_lost(); });
  clients_ = sessions_.size() - static_cast<std::size_t>(lost);
}

void ServerLoop::leave_node(std::uint32_t node, const std::string& why) {
  if (const van::Node* gone = membership_.by_id(node); gone != nullptr && gone->worker_rank >= 0) {
    rounds_.gone().leave(static_cast<std::uint32_t>(gone->worker_rank), why);
  }
  losses_due_ = true;
}

bool ServerLoop::is_quiet() const {
  return !losses_due_ && rounds_.open_rounds() == 0 && std::ranges::all_of(sessions_, &WorkerSession::is_flushed);
}

void ServerLoop::on_lost(WorkerSession& session, const std::string& why) {
  if (session.is_lost()) return;
  log_info("connection to " + session.client.name + " lost: " + why);
  session.abandon(false);
  count_clients();
  const std::string text = session.client.name + " is lost: " + why;
  if (!when_lost) return lose_node(session.client.node, text);
  // The worker's rounds fail when the cause is known, which may be the loss of another member.
  when_lost(session.client.node, text);
}

void ServerLoop::forget_lost() {
  losses_due_ = false;
  for (const auto& session : sessions_) {
    if (!session->is_lost()) continue;
    rounds_.drop_answers(*session);
    session->discard();
  }
  rounds_.fail_lost();
}

// ---- What is due

bool ServerLoop::step() {
  bool found = rounds_.resume();
  if (losses_due_) {
    forget_lost();
    found = true;
  }
  blocked_ = false;
  if (sends_due_.answers) {
    found |= send_answers();
    blocked_ = sends_due_.answers;
  }
  if (std::exchange(sends_due_.commits, false)) {
    for (const auto& session : sessions_) session->answers().send_commits(options_.epoch);
    found = true;
  }
  if (std::exchange(sends_due_.credits, false)) {
    send_credits();
    found = true;
  }
  return found;
}

bool ServerLoop::send_answers() {
  bool found = false;
  sends_due_.answers = false;
  for (const auto& session : sessions_) {
    found |= session->answers().flush();
    sends_due_.answers |= !session->answers().is_empty();
  }
  return found;
}

std::size_t ServerLoop::untold_slots() const {
  std::size_t count = 0;
  for (const auto& session : sessions_) count += session->window().untold();
  return count;
}

void ServerLoop::send_credits() {
  for (const auto& session : sessions_) session->send_credits();
}

}  // namespace bps::server
