// SPDX-License-Identifier: Apache-2.0
// Contains the hot part: answers go out. Nothing here throws, registers memory or takes a lock.
#include "server/round_ends.h"
#include "server/worker_session.h"

namespace bps::server {
namespace {

std::uint64_t answer_bytes(const Round& round, const Arrival& arrival) {
  if (!arrival.is_compressed()) return round.first.length;
  return round.compression->codec->encoded_size(round.elements());
}

}  // namespace

void RoundEnds::answer_all(Round& round, const std::byte* result, const std::byte* code) {
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
  if (parts_.counters.trace != nullptr) trace(TraceStage::kReplied, round, 0);
  close_if_over(round, round.history.summed_at);
}

void RoundEnds::answer(Round& round, Arrival& arrival, const std::byte* result) {
  round.end_answered(arrival);
  post(round, arrival, result);
}

// Sends the bytes, where they have to travel, and the immediate that says what they answer.
void RoundEnds::post(Round& round, Arrival& arrival, const std::byte* result) {
  Answer answer{.op = {.immediate = arrival.immediate}, .data = arrival.data, .round = nullptr};
  if (arrival.answer_bytes == AnswerBytes::kPosted) {
    const std::uint64_t length = answer_bytes(round, arrival);
    const transport::RemoteSpan target{arrival.answer_key, arrival.answer_address, length};
    if (transport::DirectAccess* direct = arrival.data->direct()) {
      if (direct->put(target, result) != Status::kOk) {
        return arrival.session->lose("its memory cannot be written");
      }
    } else {
      answer.op.source = &parts_.pool.region(*round.result, arrival.session->transport());
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

void RoundEnds::acknowledge(Arrival& arrival) {
  arrival.push.enter(PushStage::kTaken);
  arrival.session->post({.op = {.immediate = arrival.push_immediate}, .data = arrival.data, .round = nullptr});
}

void RoundEnds::on_written(std::uint64_t token) {
  // This is our own token, which never leaves this process.
  Round& round = parts_.table.by_token(static_cast<std::uint32_t>(token));
  // In two phases everyone has been answered from the slot by now.
  if (--round.counts.writes_in_flight == 0 && round.is_two_phase()) release(round.result);
  close_if_over(round);
}

void RoundEnds::trace(TraceStage stage, const Round& round, std::uint32_t rank) {
  const RoundKey& key = round.key;
  parts_.counters.trace->record(stage, {key.group, key.tensor, round.number, key.partition, key.for_host}, rank,
                                round.first.length);
}

}  // namespace bps::server
