// SPDX-License-Identifier: Apache-2.0
// The hot part of the round engine: a push comes in, a complete round is summed, answers go out. Nothing here throws,
// registers memory or takes a lock.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "compress/codec_call.h"
#include "server/push_check.h"
#include "server/round_engine.h"

namespace bps::server {
namespace {

// A copy: the peer may go on writing to where it lies.
tensor::PushHeader header_at(const std::byte* bytes) {
  tensor::PushHeader header;
  std::memcpy(&header, bytes, sizeof header);
  return header;
}

std::uint64_t answer_bytes(const Round& round, const Arrival& arrival) {
  if (!arrival.is_compressed()) return round.first.length;
  return round.compression->codec->encoded_size(round.first.length / sizeof(float));
}

}  // namespace

// A push has landed. The immediate is all that the peer chose; the header is checked before it is used.
void RoundEngine::on_write(WorkerSession& session, transport::DataEndpoint& from, std::uint32_t immediate,
                           std::uint64_t landed) {
  Slot* slot = pool_.by_number(immediate);
  SlotWindow& window = session.window();
  if (slot == nullptr || !window.fill(*slot, from)) {
    counters_.stale.add();
    return;
  }
  if (landed > slot->capacity) [[unlikely]] {
    release(slot);
    return session.lose("it wrote beyond its landing slot");
  }
  Push push{session, from, header_at(slot->data), slot, {}, landed - transport::kMaxHeader};
  take(push);
  // With its last slot a worker may have become the one that everybody waits for. Its later pushes change nothing about
  // that, and looking at every open round each time would cost the square of their number.
  if (window.has_run_out(*slot)) worker_ran_out_ = true;
}

void RoundEngine::on_descriptor(WorkerSession& session, transport::DataEndpoint& from, std::span<const std::byte> bytes,
                                const transport::RemoteSpan& span) {
  if (bytes.size() != sizeof(tensor::PushHeader)) {
    counters_.stale.add();
    return;
  }
  Push push{session, from, header_at(bytes.data()), nullptr, span, span.length};
  take(push);
}

// Without memory for a new key or round, the sender is lost, which ends its operations, and not the loop.
void RoundEngine::take(Push& push) try {
  Round* admitted = nullptr;
  if (push.header.epoch == limits_.epoch) {
    admitted = admit(push);
  } else {
    counters_.stale.add();
  }
  const bool has_payload = (push.header.flags & tensor::kHasPayload) != 0;
  if (push.slot != nullptr && (admitted == nullptr || !has_payload)) {
    Slot* consumed = push.slot;  // it held a header and nothing else that we need
    release(consumed);
  }
  if (admitted == nullptr) return;
  Round& round = *admitted;
  Arrival& arrival = round.arrivals[push.contributor];
  counters_.pushes.add();
  if (has_payload) counters_.received_bytes.add(push.payload);
  record(round, arrival, push);
  if (round.is_two_phase()) note_logged(arrival, push);
  if (counters_.trace != nullptr) trace(TraceStage::kPushed, round, push.session.worker_rank());
  const bool pulls = (push.header.flags & tensor::kIsPull) != 0;
  if (!pulls) {
    // A push on its own: its memory is the worker's again once we hold the bytes.
    arrival.push_immediate = push.header.immediate;
    const Status kept = keep(arrival);
    if (kept == Status::kOk) {
      acknowledge(arrival);
    } else if (kept == Status::kAgain) {
      wait(round);
    } else {
      return push.session.lose("its memory cannot be read");
    }
  }
  if (round.is(RoundPhase::kComplete)) {
    complete(round);
  } else if (round.is(RoundPhase::kAnswered) && pulls) {
    answer(round, arrival, round.result == nullptr ? nullptr : round.result->payload());
    close_if_over(round);
  } else if ((push.header.flags & tensor::kIsPush) != 0 && waits_for_starved(round)) {
    wait(round);
  }
} catch (const std::bad_alloc&) {
  push.session.lose("the server has no memory for what it pushes");
}

// The round that a push belongs to. Returns nullptr for a push that is refused or ignored.
Round* RoundEngine::admit(Push& push) {
  const tensor::PushHeader& header = push.header;
  const RoundGroup* const group = find_group(header.group, push.session.worker_rank());
  const bool is_plain = (header.flags & (tensor::kCompressed | tensor::kUnrounded)) == 0;
  push.payload = is_plain ? header.length : payload_bytes(push);
  const std::uint64_t due = (header.flags & tensor::kHasPayload) != 0 ? push.payload : 0;
  const PushLimits limits{.group = group,
                          .hosts = &hosts_,
                          .direct = push.slot == nullptr,
                          .sender_rank = push.session.worker_rank(),
                          .largest_partition = largest(header),
                          .payload = push.payload,
                          .is_whole = push.arrived == due || is_long(push, due)};
  if (const char* fault = find_fault(header, limits)) {
    refuse(push.session, header.immediate,
           {ErrorCode::kTransport, std::string("the server refused a push: ") + fault,
            "install the same bps_rdma version everywhere and use the same settings on all ranks"});
    return nullptr;
  }
  if (!gone_ranks_.empty() && refuse_gone(push, *group)) return nullptr;
  const RoundKey key{header.group, header.tensor, header.partition, (header.flags & tensor::kForHost) != 0};
  const auto [found, opened] = table_.find_or_open(key, header.round, *group, push.session.share());
  if (opened == nullptr) {
    refuse_round(push, *group, found);
    return nullptr;
  }
  Round& round = *opened;
  push.contributor = round.contributors->of_member(header.member);
  if (found == RoundTable::Found::kNew) {
    round.first = header;
    round.peers = {push.session.worker_loop(), header.place, header.priority};
    return opened;
  }
  round.peers.priority = std::max(round.peers.priority, header.priority);
  Arrival& arrival = round.arrivals[push.contributor];
  if (!round.is(RoundPhase::kFailed)) {
    const bool pushes = (header.flags & tensor::kIsPush) != 0;
    const bool pulls = (header.flags & tensor::kIsPull) != 0;
    if ((pushes && arrival.has_pushed()) || (pulls && !arrival.answer.is(AnswerStage::kNotAsked))) {
      refuse(push.session, header.immediate,
             {ErrorCode::kInternal, "a push or pull of this round came twice", "report this as a bug"});
      return nullptr;
    }
    if (agree(round.first, header) && round.agrees(push.compression)) return opened;
    disagree(round, arrival, push);
    return nullptr;
  }
  refuse_failed(round, arrival, push);
  return nullptr;
}

// Of a write that the transport has cut it tells the length of the last piece.
bool RoundEngine::is_long(const Push& push, std::uint64_t due) {
  const std::uint64_t total = transport::kMaxHeader + due;
  return push.slot != nullptr && total <= push.slot->capacity &&
         push.from.is_whole(push.arrived + transport::kMaxHeader, total);
}

// What is said of the length of a payload that is not as long as its partition; zero when that cannot be read.
std::uint64_t RoundEngine::payload_bytes(Push& push) {
  const tensor::PushHeader& header = push.header;
  const std::uint64_t room = push.slot != nullptr ? push.slot->capacity - transport::kMaxHeader : push.span.length;
  if (header.length > limits_.largest_partition || !is_valid(header.dtype)) return 0;
  if ((header.flags & tensor::kCompressed) != 0) return compressed_bytes(push, room);
  std::byte head[tensor::kUnroundedHeader];
  if (room < sizeof head) return 0;
  if (push.slot != nullptr) {
    std::memcpy(head, push.slot->payload(), sizeof head);
  } else if (push.from.direct()->get({push.span.key, push.span.address, sizeof head}, head) != Status::kOk) {
    return 0;
  }
  const std::uint64_t elements = header.length / size_of(header.dtype);
  const std::uint64_t bytes = tensor::unrounded_bytes(head, elements);
  return bytes <= tensor::most_unrounded_bytes(header.dtype, elements) ? bytes : 0;
}

std::uint64_t RoundEngine::compressed_bytes(Push& push, std::uint64_t room) {
  const tensor::PushHeader& header = push.header;
  if (room < compress::kLabelBytes) return 0;
  compress::Label label;
  if (push.slot != nullptr) {
    std::memcpy(label.data(), push.slot->payload(), label.size());
  } else if (push.from.direct()->get({push.span.key, push.span.address, label.size()}, label.data()) != Status::kOk) {
    return 0;
  }
  push.compression = compressed_summer_.find(label);
  if (push.compression == nullptr) return 0;
  const std::uint64_t bytes =
      compress::kLabelBytes + push.compression->codec->encoded_size(header.length / sizeof(float));
  return compress::stands_for_too_much(header.length, bytes) ? 0 : bytes;
}

void RoundEngine::record(Round& round, Arrival& arrival, const Push& push) {
  const tensor::PushHeader& header = push.header;
  const bool pushes = (header.flags & tensor::kIsPush) != 0;
  const bool pulls = (header.flags & tensor::kIsPull) != 0;
  arrival.session = &push.session;
  if (pushes || arrival.data == nullptr) arrival.data = &push.from;  // a span is valid where it was posted
  if (pulls || !arrival.awaits_answer()) {
    arrival.immediate = header.immediate;
    arrival.answer_key = header.answer_key;
    arrival.answer_address = header.answer_address;
    arrival.answer_bytes = (header.flags & tensor::kWantsData) != 0 ? AnswerBytes::kPosted : AnswerBytes::kNone;
  }
  if (pulls) arrival.answer.enter(AnswerStage::kAwaited);
  if (!pushes) return;
  arrival.push.enter(pulls ? PushStage::kTaken : PushStage::kUnacknowledged);
  round.count_push();
  round.history.last_rank = push.session.worker_rank();
  if ((header.flags & tensor::kHasPayload) == 0) return;
  arrival.payload = Payload::kPlain;
  arrival.slot = push.slot;
  arrival.span = push.span;
  if (header.flags < tensor::kCompressed) [[likely]]
    return;  // the same for kUnrounded, the only larger flag
  if ((header.flags & tensor::kUnrounded) != 0) arrival.payload = Payload::kUnrounded;
  if (push.compression == nullptr) return;
  arrival.payload = Payload::kCompressed;
  round.compression = push.compression;
}

// Copies a payload that was posted in place into a slot. kAgain: there is no free slot.
Status RoundEngine::keep(Arrival& arrival) {
  if (!arrival.has_payload() || arrival.slot != nullptr) return Status::kOk;
  arrival.slot = pool_.take(arrival.span.length);
  if (arrival.slot == nullptr) return Status::kAgain;
  const Status status = arrival.data->direct()->get(arrival.span, arrival.slot->payload());
  if (status != Status::kOk) release(arrival.slot);
  return status;
}

void RoundEngine::acknowledge(Arrival& arrival) {
  arrival.push.enter(PushStage::kTaken);
  arrival.session->post({.op = {.immediate = arrival.push_immediate}, .data = arrival.data, .round = nullptr});
}

// Everyone has pushed.
void RoundEngine::complete(Round& round) {
  if (round.first.kind == tensor::OperationKind::kAccumulate) {
    accumulate(round);
  } else if (round.is_contribution()) {
    contribute(round);
  } else if (round.compression != nullptr) {
    sum_compressed(round);
  } else {
    sum(round);
  }
}

void RoundEngine::sum(Round& round) {
  const bool keeps = round.first.kind >= tensor::OperationKind::kStore;
  plan_.read_from(round);
  if (round.is_two_phase() && !plan_log(round)) return;
  if (plan_.sources.empty()) {
    if (keeps) return unstore(round);
    return fail(round, {ErrorCode::kMismatch, "no rank contributed to this round", "name one root on every rank"});
  }
  if (plan_.write_to(round)) {
    if (!find_result_slot(round)) return wait(round);
    plan_.targets.push_back({.bytes = round.result->payload()});
  }
  if (keeps && !plan_kept(round)) return;
  WorkerSession* broken = nullptr;
  if (const Status status = summer_.sum(reduction_of(round), round.first.length, plan_, broken);
      status != Status::kOk) {
    return end_pass(round, status, broken);
  }
  if (keeps && !tensor::is_feedback(round.first.kind) && !keep_stored(round)) return;
  answer_all(round, round.result == nullptr ? nullptr : round.result->payload());
}

RoundFailure RoundEngine::no_memory() {
  return {ErrorCode::kInternal, "the server has no memory for this sum", "use more servers, or give them more memory"};
}

// A pass has not come to its end: the fault of a worker, or of nobody.
void RoundEngine::end_pass(Round& round, Status status, WorkerSession* broken) {
  if (status == Status::kNoMemory) return fail(round, no_memory());
  if (status == Status::kCodec) {
    return fail(round, {ErrorCode::kInvalidArgument, compress::CodecCall::take_failure() + " on " + limits_.name,
                        compress::kMendCodec});
  }
  broken->lose(status == Status::kProtocol ? "it sent a payload that no worker can have made"
                                           : "its memory cannot be reached");
}

// The slot of the first compressed payload that travelled takes the code of the result. Nobody pulls later: who sends
// compressed pushes and pulls at once.
void RoundEngine::sum_compressed(Round& round) {
  for (const Arrival& arrival : round.arrivals) {
    if (arrival.is_compressed() || arrival.data->direct() != nullptr) continue;
    return fail(round, {ErrorCode::kMismatch, "some ranks compress their part of this round, and others do not",
                        "install the same bps_rdma version everywhere and use the same settings on all ranks"});
  }
  // It is read before it is written.
  for (Arrival& arrival : round.arrivals) {
    if (arrival.is_compressed() && arrival.slot != nullptr) {
      round.result = arrival.slot;
      break;
    }
  }
  CompressedSummer::Result result;
  WorkerSession* broken = nullptr;
  Status status = Status::kOk;
  try {
    status = compressed_summer_.sum(round, summer_, plan_, round.result == nullptr ? nullptr : round.result->payload(),
                                    result, broken);
  } catch (const std::bad_alloc&) {
    round.result = nullptr;
    return fail(round, {ErrorCode::kInternal, "the server has no memory for the sum of compressed partitions",
                        "use more servers, or compress without feedback"});
  }
  if (status != Status::kOk) {
    round.result = nullptr;
    return end_pass(round, status, broken);
  }
  for (Arrival& arrival : round.arrivals) {
    if (arrival.slot == round.result) arrival.slot = nullptr;
  }
  answer_all(round, result.values, result.code);
}

// The result is known; where it is not written in place, it is copied or sent from `result`, or from its code to those
// that compress.
void RoundEngine::answer_all(Round& round, const std::byte* result, const std::byte* code) {
  if (round.is_two_phase()) {
    enter_summed(round, RoundPhase::kProposed);
    return propose_all(round, result);
  }
  enter_summed(round, RoundPhase::kAnswered);
  for (Arrival& arrival : round.arrivals) {
    release(arrival.slot);
    if (arrival.awaits_acknowledgement()) [[unlikely]]
      acknowledge(arrival);
    if (!arrival.awaits_answer()) continue;
    answer(round, arrival, arrival.is_compressed() ? code : result);
  }
  if (counters_.trace != nullptr) trace(TraceStage::kReplied, round, 0);
  close_if_over(round, round.history.summed_at);
}

void RoundEngine::trace(TraceStage stage, const Round& round, std::uint32_t rank) {
  const RoundKey& key = round.key;
  counters_.trace->record(stage, {key.group, key.tensor, round.number, key.partition, key.for_host}, rank,
                          round.first.length);
}

// The slot of the first payload becomes the result: it is read before it is written, block by block. False: no payload
// lies in a slot, and none is free.
bool RoundEngine::find_result_slot(Round& round) {
  for (Arrival& arrival : round.arrivals) {
    if (arrival.slot == nullptr) continue;
    round.result = std::exchange(arrival.slot, nullptr);
    return true;
  }
  round.result = pool_.take(round.first.length);
  return round.result != nullptr;
}

// One answer, with which a wait is over.
void RoundEngine::answer(Round& round, Arrival& arrival, const std::byte* result) {
  round.end_answered(arrival);
  post(round, arrival, result);
}

// The bytes where they have to travel, and the immediate that says what they answer.
void RoundEngine::post(Round& round, Arrival& arrival, const std::byte* result) {
  Answer answer{.op = {.immediate = arrival.immediate}, .data = arrival.data, .round = nullptr};
  if (arrival.answer_bytes == AnswerBytes::kPosted) {
    const std::uint64_t length = answer_bytes(round, arrival);
    const transport::RemoteSpan target{arrival.answer_key, arrival.answer_address, length};
    if (transport::DirectAccess* direct = arrival.data->direct()) {
      if (direct->put(target, result) != Status::kOk) {
        return arrival.session->lose("its memory cannot be written");
      }
    } else {
      answer.op.source = &pool_.region(*round.result, arrival.session->transport());
      answer.op.source_offset = round.result->offset + transport::kMaxHeader;
      answer.op.length = length;
      answer.op.target = target;
      if (!arrival.session->fails_over()) answer.op.token = round.token();
      answer.round = &round;
      ++round.counts.writes_in_flight;
    }
  }
  arrival.session->post(answer);
}

void RoundEngine::on_written(std::uint64_t token) {
  Round& round = table_.by_token(static_cast<std::uint32_t>(token));  // our own token: it never leaves this process
  // In two phases everyone has been answered from it, and the round waits for them only.
  if (--round.counts.writes_in_flight == 0 && round.is_two_phase()) release(round.result);
  close_if_over(round);
}

void RoundEngine::close_if_over(Round& round, std::uint64_t now) {
  const Round::Counts& counts = round.counts;
  if (round.is_with_servers() || counts.done < round.contributors->size() || counts.writes_in_flight > 0) return;
  release(round.result);
  table_.close(&round, now != 0 ? now : coarse_now_ns());
}

// The bytes of the slot, if there is one, have been consumed.
void RoundEngine::release(Slot*& slot) {
  if (slot != nullptr) SlotWindow::release(std::exchange(slot, nullptr), pool_);
}

}  // namespace bps::server
