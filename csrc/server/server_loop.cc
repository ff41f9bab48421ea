// The control side of a server loop: sessions, slots, groups, failures. The hot part is shard_data_path.cc.
#include "server/server_loop.h"

#include <algorithm>
#include <utility>

#include "core/log.h"

namespace bps::server {
namespace {

constexpr std::uint64_t kSmallPayload = tensor::kSmallSlot - transport::kMaxHeader;
constexpr std::uint32_t kSmallSlots = 128;  // 1 MiB per worker loop
constexpr std::uint32_t kFewestSmallSlots = 8;

}  // namespace

ServerLoop::ServerLoop(ServerLoopOptions options, van::Membership membership,
                       std::vector<transport::Transport*> slot_transports, Counters& counters)
    : options_(options), membership_(std::move(membership)), counters_(counters), pool_(std::move(slot_transports)) {}

WorkerSession::WorkerSession(ServerLoop& of, const van::Node& worker, std::uint16_t its_loop, transport::Transport* by)
    : loop(of),
      node(worker.id),
      worker_loop(its_loop),
      worker_rank(static_cast<std::uint32_t>(worker.worker_rank)),
      name(worker.describe()),
      transport(by) {}

void WorkerSession::on_message(transport::ControlEndpoint&, std::span<const std::byte> message) {
  loop.on_message(*this, message);
}
void WorkerSession::on_lost(transport::Endpoint&, const std::string& why) {
  loop.on_lost(*this, why);
}

// The session that a hello belongs to; nullptr where none may have this connection.
WorkerSession* ServerLoop::admit(const transport::Hello& hello, transport::Transport* transport) {
  auto found = std::ranges::find_if(sessions_, [&](const auto& session) {
    return session->node == hello.node && session->worker_loop == hello.client_loop && !session->lost;
  });
  if (found == sessions_.end()) {
    const van::Node* node = membership_.by_id(hello.node);
    if (node == nullptr || node->worker_rank < 0) {
      log_warning("rejected a connection: node " + std::to_string(hello.node) + " is not a worker of this job");
      return nullptr;
    }
    found =
        sessions_.insert(sessions_.end(), std::make_unique<WorkerSession>(*this, *node, hello.client_loop, transport));
  }
  WorkerSession& session = **found;
  const bool complete = hello.plane == transport::Plane::kData ? session.data.size() >= session.data_endpoints
                                                               : session.control != nullptr;
  if (complete) {
    log_warning("rejected a connection that claims to be " + session.name + ", whose connections are complete");
    return nullptr;
  }
  return &session;
}

void ServerLoop::accept(std::unique_ptr<transport::IncomingConnection> incoming, transport::Transport* transport) {
  WorkerSession* session = admit(incoming->hello, transport);
  if (session == nullptr) return;
  if (incoming->hello.plane == transport::Plane::kData) {
    session->data.push_back(transport->accept_data(std::move(incoming), *session));
  } else {
    session->control = transport->accept_control(std::move(incoming), *session);
  }
}

void ServerLoop::add_group(const van::Group& group) {
  groups_.emplace(group.id, group);
}

void ServerLoop::on_message(WorkerSession& session, std::span<const std::byte> message) {
  const auto decoded = tensor::decode(message);
  if (!decoded) {
    counters_.stale.add();
    log_warning(session.name + " sent a malformed control message, which was ignored");
    return;
  }
  try {
    if (const auto* hello = std::get_if<tensor::Attach>(&*decoded)) attach(session, *hello);
  } catch (const Error& error) {
    reject(session, error);
  }
  if (const auto* question = std::get_if<tensor::WhoIsMissing>(&*decoded)) tell_missing(session, *question);
}

void ServerLoop::attach(WorkerSession& session, const tensor::Attach& attach) {
  if (session.attached || attach.largest_payload > options_.largest_partition) return;
  session.attached = true;
  session.data_endpoints = attach.data_endpoints;
  session.needs_slots = attach.needs_slots;
  session.largest_payload = attach.largest_payload;
  if (!session.needs_slots) return;
  std::uint64_t large = options_.window;
  std::uint64_t small = kSmallSlots;
  if (options_.slot_memory > 0) {
    const std::uint64_t share = options_.slot_memory / std::max(membership_.workers, 1U);
    small = std::clamp<std::uint64_t>(share / 8 / tensor::kSmallSlot, kFewestSmallSlots, kSmallSlots);
    large = std::clamp<std::uint64_t>(share / 8 * 7 / (session.largest_payload + transport::kMaxHeader), 1,
                                      options_.window);
  }
  for (std::uint64_t i = 0; i < large; ++i) grant(session, pool_.take(session.largest_payload));
  for (std::uint64_t i = 0; i < small; ++i) grant(session, pool_.take(kSmallPayload));
}

void ServerLoop::grant(WorkerSession& session, Slot* slot) {
  slot->landing_for = &session;
  ++(tensor::is_small_slot(slot->capacity) ? session.free_small : session.free_large);
  const transport::RemoteSpan where = pool_.region(*slot, *session.transport).remote(slot->offset, slot->capacity);
  session.credits.push_back({slot->number, where.key, where.address, slot->capacity});
  credits_due_ = true;
}

// The bytes have been consumed: the slot goes back to the worker that filled it.
void ServerLoop::release(Slot* slot) {
  WorkerSession* session = slot->landing_for;
  if (session == nullptr || session->lost || slot->overflow) {
    pool_.give_back(slot);
  } else {
    grant(*session, slot);
  }
}

// Whether a worker may be unable to push. It sends in an order of its own, so that a large piece that lacks a slot also
// holds up the small ones behind it: small slots that are free say nothing, unless all its pieces are small.
bool ServerLoop::starved(const WorkerSession& session) const {
  if (!session.needs_slots || session.lost || session.free_large > 0) return false;
  return session.largest_payload > kSmallPayload || session.free_small == 0;
}

WorkerSession* ServerLoop::session_of(std::uint32_t worker_rank, std::uint16_t worker_loop) {
  for (const auto& session : sessions_) {
    if (session->worker_rank == worker_rank && session->worker_loop == worker_loop && !session->lost)
      return session.get();
  }
  return nullptr;
}

// If everyone this round waits for is out of slots, none of them can push it: give each one more.
void ServerLoop::grant_overflow(const Round& round) {
  if (round.summed || round.failed) return;
  std::uint16_t worker_loop = 0;  // all loops that talk to this one are peers of the same index
  for (const Arrival& arrival : round.arrivals) {
    if (arrival.session != nullptr) worker_loop = arrival.session->worker_loop;
  }
  for (std::uint32_t i = 0; i < round.group->size(); ++i) {
    if (round.arrivals[i].pushed) continue;
    const WorkerSession* session = session_of(round.group->ranks[i], worker_loop);
    if (session == nullptr || !starved(*session)) return;
  }
  for (std::uint32_t i = 0; i < round.group->size(); ++i) {
    if (round.arrivals[i].pushed) continue;
    WorkerSession* session = session_of(round.group->ranks[i], worker_loop);
    Slot* slot = pool_.take(session->largest_payload);
    slot->overflow = true;
    grant(*session, slot);
    counters_.overflow_slots.add();
  }
}

void ServerLoop::grant_overflows() {
  for (std::size_t i = 0; i < table_.open().size(); ++i) grant_overflow(*table_.open()[i]);
}

void ServerLoop::tell_missing(WorkerSession& session, const tensor::WhoIsMissing& question) {
  tensor::Missing reply{question.immediate, {}};
  if (const Round* round = table_.find(round_key(question.tensor, question.partition), question.round)) {
    for (std::uint32_t i = 0; i < round->group->size(); ++i) {
      if (!round->arrivals[i].pushed) reply.ranks.push_back(round->group->ranks[i]);
    }
  }
  if (session.control != nullptr) (void)session.control->send(encode(reply));
}

// ---- Failures

// There is no memory for this worker's slots, or it cannot be registered. The others go on.
void ServerLoop::reject(WorkerSession& session, const Error& error) {
  log_warning("cannot serve " + session.name + ": " + error.what() + " (" + error.hint() + ")");
  session.rejected = true;
  if (session.control != nullptr) {
    (void)session.control->send(
        encode(tensor::PushFailed{tensor::kWholeSession, error.code(), error.what(), error.hint()}));
  }
  lose_node(session.node);
}

void ServerLoop::refuse(WorkerSession& session, const tensor::PushHeader& header, ErrorCode code,
                        const std::string& what, const std::string& hint) {
  counters_.stale.add();
  if (session.control == nullptr) return;
  (void)session.control->send(encode(tensor::PushFailed{header.immediate, code, what, hint}));
}

void ServerLoop::fail(Round& round, ErrorCode code, const std::string& what, const std::string& hint) {
  round.failed = true;
  for (Arrival& arrival : round.arrivals) {
    if (arrival.session == nullptr) continue;
    if (!arrival.pulled) refuse(*arrival.session, arrival.header, code, what, hint);
    if (arrival.slot != nullptr) release(arrival.slot);
    arrival.slot = nullptr;
    arrival.span = {};
  }
}

void ServerLoop::drop(Round& round) {
  for (Arrival& arrival : round.arrivals) {
    if (arrival.slot != nullptr) release(arrival.slot);
  }
  if (round.result != nullptr) release(round.result);
  table_.close(&round);
}

void ServerLoop::lose_node(std::uint32_t node) {
  for (const auto& session : sessions_) {
    if (session->node != node || std::exchange(session->lost, true)) continue;
    // Its landing slots will be given to others.
    for (transport::DataEndpoint* endpoint : session->data) endpoint->abandon();
    if (session->control != nullptr && !session->rejected) session->control->abandon();
  }
  if (const van::Node* gone = membership_.by_id(node); gone != nullptr && gone->worker_rank >= 0) {
    lost_ranks_.insert(static_cast<std::uint32_t>(gone->worker_rank));
  }
  losses_due_ = true;
}

// The workers learn of a loss from the scheduler; here only the memory matters. A result that is still being sent to
// somebody stays until it is.
void ServerLoop::forget_lost() {
  losses_due_ = false;
  for (const auto& session : sessions_) {
    if (!session->lost) continue;
    session->answers.clear();
    session->credits.clear();
  }
  for (std::size_t i = table_.open().size(); i-- > 0;) {
    Round& round = *table_.open()[i];
    const bool hit = std::any_of(round.group->ranks.begin(), round.group->ranks.end(),
                                 [&](std::uint32_t rank) { return lost_ranks_.contains(rank); });
    if (hit && round.writes_in_flight == 0) drop(round);
  }
}

void ServerLoop::on_lost(WorkerSession& session, const std::string& why) {
  if (!session.lost) log_info("connection to " + session.name + " lost: " + why);
  lose_node(session.node);
}

}  // namespace bps::server
