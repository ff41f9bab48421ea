// SPDX-License-Identifier: Apache-2.0
#include "server/host_relay.h"

#include <cstring>

namespace bps::server {

// A contribution to a mean of integers travels in their type. Returns false when it does not fit, and fails the round.
bool HostRelay::fits(Round& round) {
  if (round.first.op != ReduceOp::kAverage || !is_integer(round.first.dtype)) return true;
  WorkerSession* broken = nullptr;
  const Status status = sums_.check_fit(round, broken);
  if (status == Status::kOk) return true;
  if (broken != nullptr) {
    sums_.end_pass(round, status, broken);
    return false;
  }
  const std::string type(to_string(round.first.dtype));
  Error failure = RoundSums::no_memory();
  if (status == Status::kOverflow) {
    failure = {ErrorCode::kInvalidArgument,
               "a mean of " + type + " over several hosts needs the sum of each host, and one does not fit " + type,
               "use a wider type, or BPS_HOST_SUM=0 on all ranks"};
  }
  decline(round, failure);
  ends_.fail(round, failure);
  return false;
}

void HostRelay::contribute(Round& round) {
  if (round.has_two_roots()) {
    decline(round, different_roots());
    return ends_.fail(round, different_roots());
  }
  if (!fits(round)) return;
  bool has_payload = false;
  bool wants_data = false;
  for (const Arrival& arrival : round.arrivals) {
    has_payload |= arrival.has_payload();
    wants_data |= !arrival.awaits_answer() || arrival.wants_data();
  }
  // A host that has the bytes which everybody gets does not need them back.
  if (tensor::copies(round.first.kind) && has_payload) wants_data = false;

  const van::Contributor& host = round.group->network[round.group->host_contributor];
  tensor::PushHeader header = round.first;
  header.flags =
      static_cast<std::uint8_t>(tensor::kIsPush | tensor::kIsPull | (has_payload ? tensor::kHasPayload : 0) |
                                (wants_data ? tensor::kWantsData : 0) | (round.first.flags & tensor::kTwoPhase));
  if (has_payload && is_exact(header.op)) header.flags |= tensor::kUnrounded;
  header.position = static_cast<std::uint16_t>(host.positions.front());
  header.answer_key = header.answer_address = 0;
  header.priority = 0;
  header.place = 0;
  round.enter(RoundPhase::kContributed);
  counters_.host_sums.add();
  network_->contribute(round.token(), header, round.peers.priority, round.peers.onward_server);
}

Status HostRelay::sum(std::uint32_t contribution, Dtype as, std::byte* into) {
  return sums_.sum_contribution(table_.by_token(contribution), as, into);
}

void HostRelay::propose(std::uint32_t contribution, const std::byte* result) {
  ends_.propose_host(table_.by_token(contribution), result);
}

void HostRelay::deliver(std::uint32_t contribution, const std::byte* result) {
  Round& round = table_.by_token(contribution);
  if (round.is(RoundPhase::kHostProposed)) return ends_.commit(round);
  // In two phases everybody has pulled, and what nobody of this host wanted has not landed here.
  if (keep_result(round, result)) ends_.answer_all(round, result);
}

// Keeps the result for pulls that come later. Returns false when there is no memory for it, and fails the round.
bool HostRelay::keep_result(Round& round, const std::byte* result) {
  bool all_wait = true;
  for (const Arrival& arrival : round.arrivals) all_wait &= !arrival.answer.is(AnswerStage::kNotAsked);
  if (all_wait) return true;
  try {
    pool_.reserve(round.first.length, 1);
  } catch (const Error& error) {
    ends_.fail(round, error);
    return false;
  }
  round.result = pool_.take(round.first.length);
  std::memcpy(round.result->payload(), result, round.first.length);
  return true;
}

void HostRelay::fail(std::uint32_t contribution, const Error& why, std::span<const std::uint32_t> missing) {
  ends_.fail(table_.by_token(contribution), why, missing);
}

void HostRelay::fail_round(std::uint32_t group, std::uint32_t tensor, std::uint32_t partition, std::uint32_t number,
                           const Error& why) {
  Round* round = table_.find({group, tensor, partition, true}, number);
  if (round == nullptr || (!round->is(RoundPhase::kOpen) && !round->is(RoundPhase::kGathered))) return;
  decline(*round, why);  // the server keeps the failed round until every contributor has come or given up
  ends_.fail(*round, why);
}

// All that the ranks have pushed is here, as they have left. So a round to which one has not pushed stays without it.
void HostRelay::end_round(std::uint32_t group, std::uint32_t tensor, std::uint32_t partition, std::uint32_t number,
                          std::uint32_t place, const Error& why) {
  const RoundKey key{group, tensor, partition, true};
  Round* round = table_.find(key, number);
  if (round != nullptr && !round->is(RoundPhase::kOpen) && !round->is(RoundPhase::kFailed)) return;  // it is on its way
  decline(key, number, place, why);
  if (round != nullptr && round->is(RoundPhase::kOpen)) ends_.fail(*round, why);
}

void HostRelay::decline(const RoundKey& key, std::uint32_t number, std::uint32_t onward_server, const Error& why) {
  if (network_ == nullptr) return;
  tensor::PushHeader header{};
  header.group = key.group;
  header.tensor = key.tensor;
  header.partition = key.partition;
  header.round = number;
  network_->refuse(header, onward_server, why);
}

}  // namespace bps::server
