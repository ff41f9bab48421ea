// SPDX-License-Identifier: Apache-2.0
#include "server/push_admission.h"

#include <algorithm>
#include <string>

#include "server/push_check.h"
#include "server/worker_session.h"
#include "tensor/operation_names.h"

namespace bps::server {
namespace {

Error mismatch(const Round& round, const Push& push) {
  const tensor::Caller caller{push.session.client.worker_rank, push.header.kind};
  const auto error = [&](const std::string& what) { return Error(ErrorCode::kMismatch, what, tensor::kCallAlike); };
  std::string others;
  for (const Arrival& one : round.arrivals) {
    if (one.session == nullptr || one.session == &push.session) continue;
    const std::uint32_t other = one.session->client.worker_rank;
    if (caller.kind != round.first.kind) {
      return error(tensor::different_operations(round.number, {other, round.first.kind}, caller));
    }
    if (push.header.root != round.first.root) return different_roots();
    others = "rank " + std::to_string(other) + " and ";
    break;
  }
  return error("ranks disagree in round " + std::to_string(round.number) + ": " + others + "rank " +
               std::to_string(caller.rank) +
               " called different operations, or with different dtype, size or reduction");
}

}  // namespace

Round* PushAdmission::admit(Push& push) {
  const tensor::PushHeader& header = push.header;
  const RoundGroup* const group = parts_.groups.find(header.group, push.session.client.worker_rank);
  measure(push, parts_.compressed, parts_.largest_partition);
  const PushLimits limits{.group = group,
                          .hosts = &parts_.groups.hosts(),
                          .direct = push.slot == nullptr,
                          .sender_rank = push.session.client.worker_rank,
                          .largest_partition = largest(header),
                          .payload = push.payload,
                          .is_whole = is_whole(push)};
  if (const char* fault = find_fault(header, limits)) {
    refuse_faulty(push, fault);
    return nullptr;
  }
  if (!parts_.gone.is_empty() && refuse_gone(push, *group)) return nullptr;
  const RoundKey key{header.group, header.tensor, header.partition, push.is_for_host()};
  const auto [found, opened] = parts_.table.find_or_open(key, header.round, *group, push.session.share());
  if (opened == nullptr) {
    refuse_round(push, *group, found);
    return nullptr;
  }
  Round& round = *opened;
  push.contributor = round.contributors->of_position(header.position);
  if (found == RoundTable::Found::kNew) {
    round.first = header;
    round.peers = {push.session.client.worker_loop, header.place, header.priority};
    return opened;
  }
  round.peers.priority = std::max(round.peers.priority, header.priority);
  const Arrival& arrival = round.arrivals[push.contributor];
  if (!round.is(RoundPhase::kFailed)) {
    if ((push.pushes() && arrival.has_pushed()) || (push.pulls() && !arrival.answer.is(AnswerStage::kNotAsked))) {
      refuse_repeated(push);
      return nullptr;
    }
    if (agree(round.first, header) && round.agrees(push.compression)) return opened;
    disagree(round, push);
    return nullptr;
  }
  refuse_failed(round, push);
  return nullptr;
}

void PushAdmission::refuse_faulty(const Push& push, const char* fault) {
  parts_.ends.refuse(push.session, push.header.immediate,
                     {ErrorCode::kTransport, std::string("the server refused a push: ") + fault,
                      "install the same bps_rdma version everywhere and use the same settings on all ranks"});
}

void PushAdmission::refuse_repeated(const Push& push) {
  parts_.ends.refuse(push.session, push.header.immediate,
                     {ErrorCode::kInternal, "a push or pull of this round came twice", "report this as a bug"});
}

void PushAdmission::refuse_round(const Push& push, const RoundGroup& group, RoundTable::Found found) {
  const std::string* why = parts_.gone.why_ended(group);
  if (found == RoundTable::Found::kTooMany) {
    reject(push.session);
  } else if (why != nullptr) {  // see RoundEnds::end_for_absent()
    parts_.ends.refuse(push.session, push.header.immediate, parts_.gone.failure_of(push.header.tensor, *why));
  } else if (!push.pushes()) {
    parts_.ends.refuse(
        push.session, push.header.immediate,
        {ErrorCode::kInvalidArgument, "a pull is for a round that is over, because its push was cancelled or failed",
         "push again before the pull"});
  } else {
    parts_.ends.refuse(
        push.session, push.header.immediate,
        {ErrorCode::kInternal, "a push came twice, or for a round that is over", "report this as a bug"});
  }
}

// Returns true when it has refused a push that would open a round of a group which lacks a member.
bool PushAdmission::refuse_gone(const Push& push, const RoundGroup& group) {
  const tensor::PushHeader& header = push.header;
  const RoundKey key{header.group, header.tensor, header.partition, push.is_for_host()};
  const std::string* why = parts_.gone.why_incomplete(group, key, nullptr, header.kind);
  if (why == nullptr) return false;
  if (parts_.table.find(key, header.round) != nullptr) return false;
  const Error failure = parts_.gone.failure_of(header.tensor, *why);
  // Nobody else knows that a rank has left, and so that this host does not contribute. When a view ends, everybody is
  // told.
  if (push.is_for_host() && !group.ends_on_host && !parts_.gone.has_view_ended()) {
    parts_.relay.decline(key, header.round, header.place, failure);
  }
  parts_.ends.refuse(push.session, header.immediate, failure);
  return true;
}

// Refuses a push to a round that has failed. The round is over when all of its members have been told.
void PushAdmission::refuse_failed(Round& round, const Push& push) {
  parts_.ends.refuse(push.session, push.header.immediate, round.failure());
  round.end(round.arrivals[push.contributor]);
  parts_.ends.close_if_over(round);
}

// Refuses a push that disagrees with its round. A round whose sum is known, or with the servers, goes on for the
// others. It may be over, and closed, when this returns.
void PushAdmission::disagree(Round& round, const Push& push) {
  const tensor::PushHeader& header = push.header;
  const Error why = mismatch(round, push);
  parts_.ends.refuse(push.session, header.immediate, why);
  Arrival& arrival = round.arrivals[push.contributor];
  if (!arrival.awaits_answer()) round.end(arrival);
  if (round.is_with_servers()) return parts_.relay.cancel(round, why);
  if (round.is_summed()) return parts_.ends.close_if_over(round);
  if (round.is_contribution()) parts_.relay.decline(round, why);
  parts_.ends.fail(round, why);
}

void PushAdmission::reject(WorkerSession& session) {
  parts_.counters.excess.add();
  session.lose("it has begun more rounds than a worker can wait for");
}

}  // namespace bps::server
