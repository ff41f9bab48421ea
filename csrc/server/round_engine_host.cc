// SPDX-License-Identifier: Apache-2.0
// The relay's half of a round for the host: the contribution goes out, and what comes back is delivered. See
// tensor/host_sum.h.
#include <cstring>
#include <utility>

#include "server/round_engine.h"

namespace bps::server {

// What the host contributes to a mean of integers travels in their type. False: it cannot, and the round has failed.
bool RoundEngine::fits(Round& round) {
  if (round.first.op != ReduceOp::kAverage || !is_integer(round.first.dtype)) return true;
  plan_.read_from(round);
  WorkerSession* broken = nullptr;
  const Status status = summer_.check_fit(round.first.dtype, round.first.length, plan_, broken);
  if (status == Status::kOk) return true;
  if (broken != nullptr) {
    end_pass(round, status, broken);
    return false;
  }
  const std::string type(to_string(round.first.dtype));
  RoundFailure failure = no_memory();
  if (status == Status::kOverflow) {
    failure = {ErrorCode::kInvalidArgument,
               "a mean of " + type + " over several hosts needs the sum of each host, and one does not fit " + type,
               "use a wider type, or BPS_HOST_SUM=0 on all ranks"};
  }
  tell_network(round, failure);
  fail(round, std::move(failure));
  return false;
}

// All ranks of the host have pushed. Their payloads are summed when the contribution can be sent.
void RoundEngine::contribute(Round& round) {
  if (!fits(round)) return;
  bool has_payload = false;
  bool wants_data = false;
  for (const Arrival& arrival : round.arrivals) {
    has_payload |= arrival.has_payload();
    wants_data |= !arrival.awaits_answer() || arrival.wants_data();
  }
  // A host that has them does not need them back.
  if (tensor::copies(round.first.kind) && has_payload) wants_data = false;

  const van::Contributor& host = round.group->network[round.group->host_contributor];
  tensor::PushHeader header = round.first;
  header.flags =
      static_cast<std::uint8_t>(tensor::kIsPush | tensor::kIsPull | (has_payload ? tensor::kHasPayload : 0) |
                                (wants_data ? tensor::kWantsData : 0) | (round.first.flags & tensor::kTwoPhase));
  if (has_payload && is_exact(header.op)) header.flags |= tensor::kUnrounded;
  header.member = static_cast<std::uint16_t>(host.members.front());
  header.answer_key = header.answer_address = 0;
  header.priority = 0;
  header.place = 0;
  round.enter(RoundPhase::kContributed);
  counters_.host_sums.add();
  network_->contribute(round.token(), header, round.peers.priority, round.peers.onward_server);
}

Status RoundEngine::read(std::uint32_t contribution, std::byte* into) {
  const Round& round = table_.by_token(contribution);
  plan_.read_from(round);
  plan_.targets.clear();
  std::optional<tensor::UnroundedWriter> unrounded;
  if (is_exact(round.first.op)) {
    unrounded.emplace(into, round.first.length / size_of(round.first.dtype));
  } else {
    plan_.targets.push_back({.bytes = into});
  }
  WorkerSession* broken = nullptr;
  const Status status =
      summer_.sum(reduction_of(round), round.first.length, plan_, broken, unrounded ? &*unrounded : nullptr);
  if (broken != nullptr) broken->lose("its memory cannot be read");
  return status;
}

void RoundEngine::deliver(std::uint32_t contribution, const std::byte* result) {
  Round& round = table_.by_token(contribution);
  if (round.is(RoundPhase::kHostProposed)) return commit(round);
  // In two phases everybody has pulled, and what nobody of this host wanted has not landed here.
  if (keep_result(round, result)) answer_all(round, result);
}

void RoundEngine::land(std::uint32_t contribution, const std::byte* result) {
  Round& round = table_.by_token(contribution);
  enter_summed(round, RoundPhase::kHostProposed);
  propose_all(round, result);
}

// For pulls that come later. False: there is no memory for it, and the round has failed.
bool RoundEngine::keep_result(Round& round, const std::byte* result) {
  bool all_wait = true;
  for (const Arrival& arrival : round.arrivals) all_wait &= !arrival.answer.is(AnswerStage::kNotAsked);
  if (all_wait) return true;
  try {
    pool_.reserve(round.first.length, 1);
  } catch (const Error& error) {
    fail(round, {error.code(), error.what(), error.hint()});
    return false;
  }
  round.result = pool_.take(round.first.length);
  std::memcpy(round.result->payload(), result, round.first.length);
  return true;
}

void RoundEngine::fail(std::uint32_t contribution, const Error& why, std::span<const std::uint32_t> missing) {
  fail(table_.by_token(contribution), {why.code(), why.what(), why.hint()}, missing);
}

void RoundEngine::fail_round(std::uint32_t group, std::uint32_t tensor, std::uint32_t partition, std::uint32_t number,
                             const Error& why) {
  Round* round = table_.find({group, tensor, partition, true}, number);
  if (round == nullptr || (!round->is(RoundPhase::kOpen) && !round->is(RoundPhase::kComplete))) return;
  RoundFailure failure{why.code(), why.what(), why.hint()};
  tell_network(*round, failure);  // the server keeps the failed round until every contributor has come or given up
  fail(*round, std::move(failure));
}

// The host will not contribute: the other hosts need not wait.
void RoundEngine::tell_network(const RoundKey& key, std::uint32_t number, std::uint32_t place,
                               const RoundFailure& why) {
  if (network_ == nullptr) return;
  tensor::PushHeader header{};
  header.group = key.group;
  header.tensor = key.tensor;
  header.partition = key.partition;
  header.round = number;
  network_->refuse(header, place, Error(why.code, why.what, why.hint));
}

}  // namespace bps::server
