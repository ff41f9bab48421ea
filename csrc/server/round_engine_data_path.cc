// SPDX-License-Identifier: Apache-2.0
// Contains the hot part of the round engine: a push comes in, and a gathered round is summed. Nothing here registers
// memory or takes a lock, and nothing is thrown to callers: without memory for a new key or round the sender is lost.
#include <cstring>
#include <new>

#include "server/round_engine.h"
#include "server/worker_session.h"

namespace bps::server {
namespace {

// Copies the header, because the peer may go on writing to where it lies.
tensor::PushHeader header_at(const std::byte* bytes) {
  tensor::PushHeader header;
  std::memcpy(&header, bytes, sizeof header);
  return header;
}

}  // namespace

// Takes a push that has landed. The peer chose only the immediate; the header is checked before it is used.
void RoundEngine::on_write(WorkerSession& session, transport::DataEndpoint& from, std::uint32_t immediate,
                           std::uint64_t landed) {
  Slot* slot = pool_.by_number(immediate);
  SlotWindow& window = session.window();
  if (slot == nullptr || !window.fill(*slot, from)) {
    counters_.stale.add();
    return;
  }
  if (landed > slot->capacity) [[unlikely]] {
    ends_.release(slot);
    return session.lose("it wrote beyond its landing slot");
  }
  Push push{session, from, header_at(slot->data), slot, {}, landed - transport::kMaxHeader};
  take(push);
  // With its last slot a worker may have become the one that everybody waits for. Its later pushes change nothing about
  // that, and looking at every open round each time would cost the square of their number.
  if (window.has_run_out(*slot)) queue_.note_empty_window();
}

void RoundEngine::on_posting(WorkerSession& session, transport::DataEndpoint& from, std::span<const std::byte> bytes,
                             const transport::RemoteSpan& span) {
  if (bytes.size() != sizeof(tensor::PushHeader)) {
    counters_.stale.add();
    return;
  }
  Push push{session, from, header_at(bytes.data()), nullptr, span, span.length};
  take(push);
}

// Takes a push. Without memory for a new key or round, the sender is lost, which ends its operations, and not the loop.
void RoundEngine::take(Push& push) try {
  Round* admitted = nullptr;
  if (push.header.epoch == epoch_) {
    admitted = admission_.admit(push);
  } else {
    counters_.stale.add();
  }
  const bool has_payload = push.has_payload();
  if (push.slot != nullptr && (admitted == nullptr || !has_payload)) {
    Slot* consumed = push.slot;  // it held a header and nothing else that we need
    ends_.release(consumed);
  }
  if (admitted == nullptr) return;
  Round& round = *admitted;
  Arrival& arrival = round.arrivals[push.contributor];
  counters_.pushes.add();
  if (has_payload) counters_.received_bytes.add(push.payload);
  record(round, arrival, push);
  if (round.is_two_phase()) arrival.is_logged = log_.is_read_after(push.header, push.slot == nullptr);
  if (counters_.trace != nullptr) ends_.trace(TraceStage::kPushed, round, push.session.client.worker_rank);
  const bool pulls = push.pulls();
  if (!pulls) {
    // The memory of a push on its own belongs to the worker again once we hold the bytes.
    arrival.push_immediate = push.header.immediate;
    const Status kept = keep(arrival);
    if (kept == Status::kOk) {
      RoundEnds::acknowledge(arrival);
    } else if (kept == Status::kAgain) {
      queue_.add(round);
    } else {
      return push.session.lose("its memory cannot be read");
    }
  }
  if (!gone_.is_empty()) [[unlikely]] {
    if (const std::string* const why = ask_relays(round)) {
      return ends_.fail(round, gone_.failure_of(round.key.tensor, *why));
    }
  }
  if (round.is(RoundPhase::kGathered)) {
    complete(round);
  } else if (round.is(RoundPhase::kAnswered) && pulls) {
    ends_.answer(round, arrival, RoundSums::result_of(round));
    ends_.close_if_over(round);
  } else if (push.pushes() && queue_.is_starved(round)) {
    queue_.add(round);
  }
} catch (const std::bad_alloc&) {
  push.session.lose("the server has no memory for what it pushes");
}

// Copies a payload that was posted in place into a slot. Returns kAgain when no slot is free.
Status RoundEngine::keep(Arrival& arrival) {
  if (!arrival.has_payload() || arrival.slot != nullptr) return Status::kOk;
  arrival.slot = pool_.take(arrival.span.length);
  if (arrival.slot == nullptr) return Status::kAgain;
  const Status status = arrival.data->direct()->get(arrival.span, arrival.slot->payload());
  if (status != Status::kOk) ends_.release(arrival.slot);
  return status;
}

// Completes a round to which everyone has pushed.
void RoundEngine::complete(Round& round) {
  if (round.first.kind == tensor::OperationKind::kAccumulate) {
    stored_.accumulate(round);
  } else if (round.is_contribution()) {
    relay_.contribute(round);
  } else if (round.compression != nullptr) {
    sums_.sum_compressed(round);
  } else {
    sum(round);
  }
}

void RoundEngine::sum(Round& round) {
  const bool keeps = round.first.kind >= tensor::OperationKind::kStore;
  const bool stores = round.first.kind == tensor::OperationKind::kStore;
  SumPlan& plan = sums_.plan();
  plan.read_from(round);
  if (round.is_two_phase() && !log_.begin(round, plan)) return;
  if (plan.sources.empty()) {
    if (stores && round.first.root == tensor::PushHeader::kNobody) return stored_.give_back(round);
    return ends_.fail(round,
                      {ErrorCode::kMismatch, "no rank contributed to this round", "name one root on every rank"});
  }
  if (round.has_two_roots()) return ends_.fail(round, different_roots());
  if (!sums_.plan_targets(round)) return;
  if (keeps && !(stores ? stored_.plan_store(round) : sums_.plan_feedback(round))) return;
  if (!sums_.run(round, reduction_of(round)) || (stores && !stored_.store(round))) return;
  ends_.answer_all(round, RoundSums::result_of(round));
}

}  // namespace bps::server
