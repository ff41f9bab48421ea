// SPDX-License-Identifier: Apache-2.0
#include "server/round_sums.h"

#include <new>
#include <optional>
#include <utility>

#include "compress/codec_call.h"
#include "server/worker_session.h"
#include "tensor/unrounded.h"

namespace bps::server {

bool RoundSums::plan_slot(Round& round) {
  if (round.result == nullptr && !find_result_slot(round)) {
    queue_.add(round);
    return false;
  }
  plan_.targets.push_back({.bytes = round.result->payload()});
  return true;
}

bool RoundSums::plan_feedback(Round& round) try {
  std::vector<float>& kept = compressed_.residual_of(round, round.elements());  // what is fed back is float32
  auto* const bytes = reinterpret_cast<std::byte*>(kept.data());
  if (round.first.kind == tensor::OperationKind::kReadFeedback) {
    plan_.sources.assign(1, {.bytes = bytes});
  } else {
    plan_.targets.push_back({.bytes = bytes});
  }
  return true;
} catch (const std::bad_alloc&) {
  ends_.fail(round, {ErrorCode::kInternal, "the server has no memory for what it feeds back", "use more servers"});
  return false;
}

// Makes the slot of the first payload the place of the result: it is read before it is written, block by block. Returns
// false when no payload lies in a slot, and none is free.
bool RoundSums::find_result_slot(Round& round) {
  for (Arrival& arrival : round.arrivals) {
    if (arrival.slot == nullptr) continue;
    round.result = std::exchange(arrival.slot, nullptr);
    return true;
  }
  round.result = pool_.take(round.first.length);
  return round.result != nullptr;
}

// The code of the result goes into the slot of the first compressed payload that travelled. Nobody pulls later: a rank
// that sends compressed pushes and pulls at once.
void RoundSums::sum_compressed(Round& round) {
  for (const Arrival& arrival : round.arrivals) {
    if (arrival.is_compressed() || arrival.data->direct() != nullptr) continue;
    return ends_.fail(round, {ErrorCode::kMismatch, "some ranks compress their part of this round, and others do not",
                              "install the same bps_rdma version everywhere and use the same settings on all ranks"});
  }
  // The slot is read before it is written.
  for (Arrival& arrival : round.arrivals) {
    if (arrival.is_compressed() && arrival.slot != nullptr) {
      round.result = arrival.slot;
      break;
    }
  }
  std::byte* const code = round.result == nullptr ? nullptr : round.result->payload();
  CompressedSummer::Result result;
  WorkerSession* broken = nullptr;
  Status status = Status::kOk;
  try {
    status = compressed_.sum(round, summer_, plan_, code, result, broken);
  } catch (const std::bad_alloc&) {
    round.result = nullptr;
    return ends_.fail(round, {ErrorCode::kInternal, "the server has no memory for the sum of compressed partitions",
                              "use more servers, or compress without feedback"});
  }
  if (status != Status::kOk) {
    round.result = nullptr;
    return end_pass(round, status, broken);
  }
  for (Arrival& arrival : round.arrivals) {
    if (arrival.slot == round.result) arrival.slot = nullptr;
  }
  ends_.answer_all(round, result.values, result.code);
}

Status RoundSums::sum_contribution(const Round& round, Dtype as, std::byte* into) {
  plan_.read_from(round);
  plan_.targets.clear();
  if (as != round.first.dtype) {
    WorkerSession* broken = nullptr;
    const std::span<float> sum(reinterpret_cast<float*>(into), round.elements());
    const Status status = summer_.sum_as_float32(reduction_of(round), plan_, sum, broken);
    if (broken != nullptr) broken->lose("its memory cannot be read");
    return status;
  }
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

Status RoundSums::check_fit(Round& round, WorkerSession*& broken) {
  plan_.read_from(round);
  return summer_.check_fit(round.first.dtype, round.first.length, plan_, broken);
}

// Ends a pass that failed. It is the fault of a worker, which is lost, or of nobody.
void RoundSums::end_pass(Round& round, Status status, WorkerSession* broken) {
  if (status == Status::kNoMemory) return ends_.fail(round, no_memory());
  if (status == Status::kCodec) {
    return ends_.fail(round, {ErrorCode::kInvalidArgument, compress::CodecCall::take_failure() + " on " + name_,
                              compress::kMendCodec});
  }
  broken->lose(status == Status::kProtocol ? "it sent a payload that no worker can have made"
                                           : "its memory cannot be reached");
}

Error RoundSums::no_memory() {
  return {ErrorCode::kInternal, "the server has no memory for this sum", "use more servers, or give them more memory"};
}

}  // namespace bps::server
