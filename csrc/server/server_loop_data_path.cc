// The hot part of a server loop: a push comes in, a complete round is summed, answers go out.
#include <algorithm>
#include <cstring>

#include "server/server_loop.h"

namespace bps::server {
namespace {

constexpr std::size_t kMostCredits = (transport::kMaxMessage - 16) / sizeof(tensor::SlotCredit);

}  // namespace

void WorkerSession::on_write(transport::DataEndpoint& from, std::uint32_t immediate) {
  loop.on_write(*this, from, immediate);
}
void WorkerSession::on_descriptor(transport::DataEndpoint& from, std::span<const std::byte> header,
                                  const transport::RemoteSpan& span) {
  loop.on_descriptor(*this, from, header, span);
}
void WorkerSession::on_written(transport::DataEndpoint&, std::uint64_t token) {
  loop.on_written(token);
}

// [8] A push has landed. The immediate is all the peer chose; everything is checked before it is used.
void ServerLoop::on_write(WorkerSession& session, transport::DataEndpoint& from, std::uint32_t immediate) {
  Slot* slot = pool_.by_number(immediate);
  if (slot == nullptr || slot->landing_for != &session) {
    counters_.stale.add();
    return;
  }
  std::uint32_t& held = tensor::is_small_slot(slot->capacity) ? session.free_small : session.free_large;
  if (held > 0) --held;
  tensor::PushHeader header;
  std::memcpy(&header, slot->data, sizeof header);
  try {
    take(session, from, header, slot, {});
    // With its last slot a worker may have become the one that everybody waits for. Later arrivals change nothing about
    // that, and looking at every open round each time would cost the square of their number.
    if (held == 0 && session.free_large == 0) grant_overflows();
  } catch (const Error& error) {  // the pool had to grow, and could not
    reject(session, error);
  }
}

void ServerLoop::on_descriptor(WorkerSession& session, transport::DataEndpoint& from, std::span<const std::byte> bytes,
                               const transport::RemoteSpan& span) {
  tensor::PushHeader header;
  if (bytes.size() != sizeof header) {
    counters_.stale.add();
    return;
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  try {
    take(session, from, header, nullptr, span);
  } catch (const Error& error) {
    reject(session, error);
  }
}

bool ServerLoop::check(WorkerSession& session, const tensor::PushHeader& header, const Slot* slot,
                       const transport::RemoteSpan& span) {
  const auto group = groups_.find(header.group);
  const char* wrong = nullptr;
  if (!codec::accepts(header)) {
    wrong = "its version, dtype, operation, flags or length is not one that a worker sends";
  } else if (header.length > options_.largest_partition) {
    wrong = "it is longer than the largest partition";
  } else if (group == groups_.end() || header.member >= group->second.size() ||
             group->second.ranks[header.member] != session.worker_rank) {
    wrong = "its group is unknown or does not contain the sender";
  } else if ((header.flags & tensor::kHasPayload) != 0 &&
             (slot != nullptr ? slot->capacity < transport::kMaxHeader + header.length
                              : span.length != header.length)) {
    wrong = "its payload is not as long as it says";
  }
  if (wrong == nullptr) return true;
  refuse(session, header, ErrorCode::kTransport, std::string("the server refused a push: ") + wrong,
         "install the same bps_rdma version everywhere and use the same settings on all ranks");
  return false;
}

bool ServerLoop::agrees(Round& round, WorkerSession& session, const tensor::PushHeader& header) {
  const tensor::PushHeader& first = round.first;
  if (first.dtype == header.dtype && first.op == header.op && first.kind == header.kind &&
      first.length == header.length && first.group == header.group) {
    return true;
  }
  std::string others;
  for (const Arrival& arrival : round.arrivals) {
    if (arrival.session != nullptr) others = "rank " + std::to_string(arrival.session->worker_rank);
  }
  round.disagreement = "ranks disagree in round " + std::to_string(header.round) + ": " + others + " and rank " +
                       std::to_string(session.worker_rank) +
                       " called different operations, or with different dtype, size or reduction";
  fail(round, ErrorCode::kMismatch, round.disagreement,
       "call the same operation with the same arguments for a name on every rank of the group");
  return false;
}

void ServerLoop::take(WorkerSession& session, transport::DataEndpoint& from, const tensor::PushHeader& header,
                      Slot* slot, const transport::RemoteSpan& span) {
  const auto give_up = [&] {
    if (slot != nullptr) release(slot);
  };
  if (!check(session, header, slot, span)) return give_up();
  const van::Group& group = groups_.find(header.group)->second;
  for (const std::uint32_t rank : lost_ranks_) {
    if (group.index_of(rank) >= 0) return give_up();  // the scheduler tells the workers whom they lost
  }
  const auto [found, opened] = table_.find_or_open(round_key(header.tensor, header.partition), header.round, group);
  if (opened == nullptr) {
    if (found == RoundTable::Found::kOver) {
      refuse(session, header, ErrorCode::kInternal, "a push came twice, or for a round that is over",
             "report this as a bug");
    } else {
      refuse(session, header, ErrorCode::kInvalidArgument, "a push is more than 65536 rounds ahead of the other ranks",
             "wait for earlier rounds of a name before starting so many more");
    }
    return give_up();
  }
  Round& round = *opened;
  if (found == RoundTable::Found::kNew) round.first = header;
  Arrival& arrival = round.arrivals[header.member];
  if (round.failed || !agrees(round, session, header)) {
    if (arrival.session == nullptr) {
      refuse(session, header, ErrorCode::kMismatch, round.disagreement,
             "call the same operation with the same arguments for a name on every rank of the group");
      arrival.session = &session;
      if (++round.pushed == group.size()) drop(round);  // everybody has been told
    }
    return give_up();
  }
  const bool pushes = (header.flags & tensor::kIsPush) != 0;
  const bool pulls = (header.flags & tensor::kIsPull) != 0;
  if ((pushes && arrival.pushed) || (pulls && (arrival.pull_waiting || arrival.pulled))) {
    refuse(session, header, ErrorCode::kInternal, "a push or pull of this round came twice", "report this as a bug");
    return give_up();
  }

  counters_.pushes.add();
  arrival.session = &session;
  arrival.data = &from;
  arrival.header = header;
  if (pushes) {
    arrival.pushed = true;
    ++round.pushed;
    arrival.has_payload = (header.flags & tensor::kHasPayload) != 0;
  }
  if (pushes && arrival.has_payload) {
    arrival.slot = slot;
    arrival.span = span;
  } else if (slot != nullptr) {
    release(slot);  // it held a header and nothing else
  }
  if (pulls) {
    arrival.pull_waiting = true;
  } else {
    // A push on its own: its memory is the worker's again once we hold the bytes.
    if (!keep(arrival)) return lose_node(session.node);
    post(session, {.op = {.immediate = header.immediate}, .data = &from, .round = nullptr});
  }

  if (round.pushed == group.size() && !round.summed) {
    sum(round);
  } else if (round.summed && pulls) {
    answer(round, arrival, false);
    close_if_over(round);
  } else if (pushes) {
    grant_overflow(round);  // perhaps only workers without slots are missing now
  }
}

// Makes sure that the payload is ours: copies what was posted in place into a slot.
bool ServerLoop::keep(Arrival& arrival) {
  if (!arrival.has_payload || arrival.slot != nullptr) return true;
  arrival.slot = pool_.take(arrival.header.length);
  if (arrival.data->direct()->get(arrival.span, arrival.slot->payload()) != Status::kOk) return false;
  arrival.span = {};
  return true;
}

// [9] Everyone has pushed.
void ServerLoop::sum(Round& round) {
  sources_.clear();
  targets_.clear();
  placed_.assign(round.arrivals.size(), false);
  bool needs_result = false;
  for (std::size_t i = 0; i < round.arrivals.size(); ++i) {
    Arrival& arrival = round.arrivals[i];
    transport::DirectAccess* direct = arrival.data->direct();
    if (arrival.has_payload) {
      SumSource source{.direct = direct, .span = arrival.span, .session = arrival.session};
      source.bytes = arrival.slot != nullptr ? arrival.slot->payload() : direct->map(arrival.span);
      sources_.push_back(source);
    }
    const bool wants_data = (arrival.header.flags & tensor::kWantsData) != 0;
    if (!arrival.pull_waiting) {
      needs_result = true;  // a pull comes later
    } else if (wants_data && direct == nullptr) {
      needs_result = true;
    } else if (wants_data) {
      const transport::RemoteSpan span{arrival.header.answer_key, arrival.header.answer_address, round.first.length};
      targets_.push_back({.bytes = direct->map(span), .direct = direct, .span = span, .session = arrival.session});
      placed_[i] = true;
    }
  }
  if (needs_result) {
    // The slot of the first payload becomes the result: it is read before it is written, block by block.
    for (Arrival& arrival : round.arrivals) {
      if (arrival.slot == nullptr || round.result != nullptr) continue;
      round.result = arrival.slot;
      arrival.slot = nullptr;
    }
    if (round.result == nullptr) round.result = pool_.take(round.first.length);
    targets_.push_back({.bytes = round.result->payload()});
  }
  WorkerSession* broken = nullptr;
  if (sources_.empty()) {
    return fail(round, ErrorCode::kMismatch, "no rank contributed to this round", "name one root on every rank");
  }
  if (summer_.sum(round.first, round.group->size(), sources_, targets_, round.first.length, broken) != Status::kOk) {
    return lose_node(broken->node);
  }
  round.summed = true;
  counters_.rounds.add();
  counters_.summed_bytes.add(round.first.length);
  for (std::size_t i = 0; i < round.arrivals.size(); ++i) {
    Arrival& arrival = round.arrivals[i];
    if (arrival.slot != nullptr) release(arrival.slot);
    arrival.slot = nullptr;
    if (arrival.pull_waiting) answer(round, arrival, placed_[i]);
  }
  close_if_over(round);
}

// [10] One answer: the bytes where they have to travel, and the immediate that says which wait is over.
void ServerLoop::answer(Round& round, Arrival& arrival, bool in_place) {
  arrival.pull_waiting = false;
  arrival.pulled = true;
  ++round.pulled;
  const tensor::PushHeader& header = arrival.header;
  WorkerSession::Answer answer{.op = {.immediate = header.immediate}, .data = arrival.data, .round = nullptr};
  if ((header.flags & tensor::kWantsData) != 0 && !in_place) {
    const transport::RemoteSpan target{header.answer_key, header.answer_address, round.first.length};
    if (transport::DirectAccess* direct = arrival.data->direct()) {
      if (direct->put(target, round.result->payload()) != Status::kOk) return lose_node(arrival.session->node);
    } else {
      answer.op.source = &pool_.region(*round.result, *arrival.session->transport);
      answer.op.source_offset = round.result->offset + transport::kMaxHeader;
      answer.op.length = round.first.length;
      answer.op.target = target;
      answer.op.token = round.number_in_table;
      answer.round = &round;
      ++round.writes_in_flight;
    }
  }
  post(*arrival.session, answer);
}

void ServerLoop::post(WorkerSession& session, WorkerSession::Answer answer) {
  if (session.lost) {
    if (answer.round != nullptr) --answer.round->writes_in_flight;
    return;
  }
  if (session.answers.empty() && answer.data->write({&answer.op, 1}) == 1) return;
  session.answers.push_back(answer);
  answers_due_ = true;
}

void ServerLoop::on_written(std::uint64_t token) {
  Round& round = table_.by_number(token);  // our own token: it never leaves this process
  --round.writes_in_flight;
  close_if_over(round);
}

void ServerLoop::close_if_over(Round& round) {
  if (round.pulled < round.group->size() || round.writes_in_flight > 0) return;
  if (round.result != nullptr) release(round.result);
  table_.close(&round);
}

// One message per turn, unless the slots are too many for one.
void ServerLoop::send_credits(WorkerSession& session) {
  for (std::size_t at = 0; at < session.credits.size(); at += kMostCredits) {
    const auto first = session.credits.begin() + static_cast<std::ptrdiff_t>(at);
    const auto count = std::min(kMostCredits, session.credits.size() - at);
    (void)session.control->send(encode(tensor::Credits{{first, first + static_cast<std::ptrdiff_t>(count)}}));
  }
  session.credits.clear();
}

bool ServerLoop::step() {
  bool found = losses_due_;
  blocked_ = false;
  if (losses_due_) forget_lost();
  if (answers_due_) {
    answers_due_ = false;
    for (const auto& session : sessions_) {
      std::size_t sent = 0;
      while (sent < session->answers.size() && session->answers[sent].data->write({&session->answers[sent].op, 1}) == 1)
        ++sent;
      session->answers.erase(session->answers.begin(), session->answers.begin() + static_cast<std::ptrdiff_t>(sent));
      found |= sent > 0;
      answers_due_ |= !session->answers.empty();
    }
    blocked_ = answers_due_;
  }
  if (credits_due_) {
    credits_due_ = false;
    found = true;
    for (const auto& session : sessions_) {
      if (session->credits.empty() || session->lost || session->control == nullptr) continue;
      send_credits(*session);
    }
  }
  return found;
}

}  // namespace bps::server
