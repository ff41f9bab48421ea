// The control side of a server loop: links, slots, groups, failures. The hot part is shard_data_path.cc.
#include "server/shard.h"

#include <algorithm>
#include <utility>

#include "core/log.h"

namespace bps {
namespace {

constexpr std::uint64_t kSmallPayload = kSmallSlot - kMaxHeader;
constexpr std::uint32_t kSmallSlots = 128;  // 1 MiB per worker loop
constexpr std::uint32_t kFewestSmallSlots = 8;

}  // namespace

Shard::Shard(ShardOptions options, Membership membership, std::vector<Transport*> slot_transports, Counters& counters)
    : options_(options), membership_(std::move(membership)), counters_(counters), pool_(std::move(slot_transports)) {}

void Shard::add_endpoint(Endpoint* endpoint, Transport* transport) {
  const Hello& hello = endpoint->hello;
  auto found = std::find_if(links_.begin(), links_.end(), [&](const auto& link) {
    return link->node == hello.node && link->lane == hello.lane && !link->lost;
  });
  if (found == links_.end()) {
    auto link = std::make_unique<Link>();
    link->node = hello.node;
    link->lane = hello.lane;
    const Node* node = membership_.by_id(hello.node);
    if (node == nullptr || node->worker_rank < 0) {
      log_warning("a node that is no worker (" + std::to_string(hello.node) + ") called this server; ignored");
      transport->close(endpoint);
      return;
    }
    link->worker_rank = static_cast<std::uint32_t>(node->worker_rank);
    link->name = node->describe();
    link->transport = transport;
    links_.push_back(std::move(link));
    found = std::prev(links_.end());
  }
  Link& link = **found;
  if (endpoint->is_data_plane ? link.data.size() >= link.data_endpoints : link.control != nullptr) {
    log_warning("a caller says it is " + link.name + ", whose connections are complete; turned away");
    transport->close(endpoint);
    return;
  }
  endpoint->user = &link;
  endpoint->sink = this;
  if (endpoint->is_data_plane) {
    link.data.push_back(endpoint);
  } else {
    link.control = endpoint;
  }
}

std::vector<Endpoint*> Shard::endpoints() const {
  std::vector<Endpoint*> all;
  for (const auto& link : links_) {
    all.insert(all.end(), link->data.begin(), link->data.end());
    if (link->control != nullptr) all.push_back(link->control);
  }
  return all;
}

void Shard::add_group(const Group& group) {
  groups_.emplace(group.id, group);
}

void Shard::on_message(Endpoint& from, std::span<const std::byte> message) {
  Link& link = *static_cast<Link*>(from.user);
  const auto decoded = decode_link_message(message);
  if (!decoded) {
    counters_.stale.add();
    log_warning(link.name + " sent a control message that is none; ignored");
    return;
  }
  try {
    if (const auto* hello = std::get_if<Attach>(&*decoded)) attach(link, *hello);
  } catch (const Error& error) {
    turn_away(link, error);
  }
  if (const auto* question = std::get_if<WhoIsMissing>(&*decoded)) tell_missing(link, *question);
}

void Shard::attach(Link& link, const Attach& attach) {
  if (link.attached || attach.largest_payload > options_.largest_partition) return;
  link.attached = true;
  link.data_endpoints = attach.data_endpoints;
  link.needs_slots = attach.needs_slots;
  link.largest_payload = attach.largest_payload;
  if (!link.needs_slots) return;
  std::uint64_t large = options_.window;
  std::uint64_t small = kSmallSlots;
  if (options_.slot_memory > 0) {
    const std::uint64_t share = options_.slot_memory / std::max(membership_.workers, 1U);
    small = std::clamp<std::uint64_t>(share / 8 / kSmallSlot, kFewestSmallSlots, kSmallSlots);
    large = std::clamp<std::uint64_t>(share / 8 * 7 / (link.largest_payload + kMaxHeader), 1, options_.window);
  }
  for (std::uint64_t i = 0; i < large; ++i) grant(link, pool_.take(link.largest_payload));
  for (std::uint64_t i = 0; i < small; ++i) grant(link, pool_.take(kSmallPayload));
}

void Shard::grant(Link& link, Slot* slot) {
  slot->landing_for = &link;
  ++(is_small_slot(slot->capacity) ? link.free_small : link.free_large);
  const RemoteSpan where = pool_.region(*slot, *link.transport).remote(slot->offset, slot->capacity);
  link.credits.push_back({slot->number, where.key, where.address, slot->capacity});
  credits_due_ = true;
}

// The bytes have been consumed: the slot goes back to the worker that filled it.
void Shard::release(Slot* slot) {
  auto* link = static_cast<Link*>(slot->landing_for);
  if (link == nullptr || link->lost || slot->beyond_window) {
    pool_.give_back(slot);
  } else {
    grant(*link, slot);
  }
}

// Whether a worker may be unable to push. It sends in an order of its own, so that a large piece that lacks a slot also
// holds up the small ones behind it: small slots that are free say nothing, unless all its pieces are small.
bool Shard::starved(const Link& link) const {
  if (!link.needs_slots || link.lost || link.free_large > 0) return false;
  return link.largest_payload > kSmallPayload || link.free_small == 0;
}

Link* Shard::link_of(std::uint32_t worker_rank, std::uint16_t lane) {
  for (const auto& link : links_) {
    if (link->worker_rank == worker_rank && link->lane == lane && !link->lost) return link.get();
  }
  return nullptr;
}

// If everyone this round waits for is out of slots, none of them can push it: give each one more.
void Shard::relieve(const Round& round) {
  if (round.summed || round.failed) return;
  std::uint16_t lane = 0;  // all loops that talk to this one are peers of the same index
  for (const Arrival& arrival : round.arrivals) {
    if (arrival.link != nullptr) lane = arrival.link->lane;
  }
  for (std::uint32_t i = 0; i < round.group->size(); ++i) {
    if (round.arrivals[i].pushed) continue;
    const Link* link = link_of(round.group->ranks[i], lane);
    if (link == nullptr || !starved(*link)) return;
  }
  for (std::uint32_t i = 0; i < round.group->size(); ++i) {
    if (round.arrivals[i].pushed) continue;
    Link* link = link_of(round.group->ranks[i], lane);
    Slot* slot = pool_.take(link->largest_payload);
    slot->beyond_window = true;
    grant(*link, slot);
    counters_.overflow_slots.add();
  }
}

void Shard::relieve_all() {
  for (std::size_t i = 0; i < table_.open().size(); ++i) relieve(*table_.open()[i]);
}

void Shard::tell_missing(Link& link, const WhoIsMissing& question) {
  Missing reply{question.immediate, {}};
  if (const Round* round = table_.find(round_key(question.tensor, question.partition), question.round)) {
    for (std::uint32_t i = 0; i < round->group->size(); ++i) {
      if (!round->arrivals[i].pushed) reply.ranks.push_back(round->group->ranks[i]);
    }
  }
  if (link.control != nullptr) (void)link.control->send(encode(reply));
}

// ---- Failures

// There is no memory for this worker's slots, or it cannot be registered. The others go on.
void Shard::turn_away(Link& link, const Error& error) {
  log_warning("cannot serve " + link.name + ": " + error.what() + " (" + error.hint() + ")");
  link.turned_away = true;
  if (link.control != nullptr) {
    (void)link.control->send(
        encode(PushFailed{kWholeLink, static_cast<std::uint8_t>(error.code()), error.what(), error.hint()}));
  }
  lose_node(link.node);
}

void Shard::refuse(Link& link, const PushHeader& header, ErrorCode code, const std::string& what,
                   const std::string& hint) {
  counters_.stale.add();
  if (link.control == nullptr) return;
  (void)link.control->send(encode(PushFailed{header.immediate, static_cast<std::uint8_t>(code), what, hint}));
}

void Shard::fail(Round& round, ErrorCode code, const std::string& what, const std::string& hint) {
  round.failed = true;
  for (Arrival& arrival : round.arrivals) {
    if (arrival.link == nullptr) continue;
    if (!arrival.pulled) refuse(*arrival.link, arrival.header, code, what, hint);
    if (arrival.slot != nullptr) release(arrival.slot);
    arrival.slot = nullptr;
    arrival.span = {};
  }
}

void Shard::drop(Round& round) {
  for (Arrival& arrival : round.arrivals) {
    if (arrival.slot != nullptr) release(arrival.slot);
  }
  if (round.result != nullptr) release(round.result);
  table_.close(&round);
}

void Shard::lose_node(std::uint32_t node) {
  for (const auto& link : links_) {
    if (link->node != node || std::exchange(link->lost, true)) continue;
    // Its landing slots will be given to others.
    for (Endpoint* endpoint : link->data) endpoint->abandon();
    if (link->control != nullptr && !link->turned_away) link->control->abandon();
  }
  if (const Node* gone = membership_.by_id(node); gone != nullptr && gone->worker_rank >= 0) {
    lost_ranks_.insert(static_cast<std::uint32_t>(gone->worker_rank));
  }
  losses_due_ = true;
}

// The workers learn of a loss from the scheduler; here only the memory matters. A result that is still being sent to
// somebody stays until it is.
void Shard::forget_lost() {
  losses_due_ = false;
  for (const auto& link : links_) {
    if (!link->lost) continue;
    link->answers.clear();
    link->credits.clear();
  }
  for (std::size_t i = table_.open().size(); i-- > 0;) {
    Round& round = *table_.open()[i];
    const bool hit = std::any_of(round.group->ranks.begin(), round.group->ranks.end(),
                                 [&](std::uint32_t rank) { return lost_ranks_.contains(rank); });
    if (hit && round.writes_in_flight == 0) drop(round);
  }
}

void Shard::on_lost(Endpoint& peer, const std::string& why) {
  Link& link = *static_cast<Link*>(peer.user);
  if (!link.lost) log_info("connection to " + link.name + " lost: " + why);
  lose_node(link.node);
}

}  // namespace bps
