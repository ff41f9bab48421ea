// SPDX-License-Identifier: Apache-2.0
#include "worker/portion.h"

#include <cstring>

#include "core/log.h"
#include "worker/operation.h"

namespace bps::worker {

std::uint64_t Portion::restart(std::uint64_t order) {
  next = 0;
  fetched_ = 0;
  unfinished = static_cast<std::uint32_t>(parts.size());
  sequence = order;
  return parts.size();
}

Status Portion::fill(const Part& part, tensor::Extent& extent, std::byte* into, Counters& counters) {
  const std::byte* const from = input_bytes + extent.input_offset;
  if (extent.is_compressed()) return encode(part, extent, from, into, counters);
  std::memcpy(into, from, extent.length);
  counters.copies.add();
  counters.copied_bytes.add(extent.length);
  return Status::kOk;
}

Status Portion::encode(const Part& part, const tensor::Extent& extent, const std::byte* from, std::byte* into,
                       Counters& counters) {
  const std::uint64_t seed = compress::seed_of(header->tensor, part.partition, header->round, header->position);
  return operation->tensor->compressor->encode(part.partition, extent.input_offset, extent, from,
                                               operation->tensor->dtype, into, seed, counters);
}

Status Portion::take_answer(const Part& part, const tensor::Extent& extent, const std::byte* from, Counters& counters) {
  if (!extent.wants_data()) return Status::kOk;
  if (extent.is_compressed()) {
    return operation->tensor->compressor->decode(extent, from, output_bytes + extent.output_offset, counters);
  }
  const Continuation* continuation = operation->continuation.get();
  copy_result(extent, continuation == nullptr ? 0 : continuation->begun(part.partition), from, output_bytes);
  counters.copies.add();
  counters.copied_bytes.add(extent.length);
  return Status::kOk;
}

bool Portion::fail(ErrorCode code, const std::string& what, const std::string& hint) {
  return operation->fail(code, what, hint);
}

void Portion::note_missing(const std::string& server, const std::vector<std::uint32_t>& ranks) {
  if (operation->failure()->code() != ErrorCode::kTimeout) return;
  operation->explain(server + " still waits for " + van::name_ranks(ranks));
}

tensor::Cancel Portion::make_cancel() const {
  tensor::Cancel message;
  message.group = operation->tensor->group->id;
  message.tensor = operation->tensor->id;
  message.round = operation->round;
  const auto failure = operation->failure();
  message.code = failure->code() == ErrorCode::kNotInitialized ? ErrorCode::kPeerLost : failure->code();
  message.what = "rank " + std::to_string(operation->tensor->group->ranks[operation->tensor->position]) + " gave up: " +
                 std::string(failure->what()).substr(operation->describe().size() + 2);  // each rank names it itself
  message.hint = failure->hint();
  return message;
}

// A failure on all ranks leaves nothing to the next view. One that no server has acknowledged may be a success
// elsewhere, if the answer has landed here.
bool Portion::suspend(std::uint32_t partition, const Landed& landed, bool failed) {
  const auto why = operation->failure();
  if (!why) return false;
  const bool is_late = why->code() == ErrorCode::kTimeout;
  if (!is_late && why->code() != ErrorCode::kRoundAborted) return false;
  if (is_late && failed) {
    operation->suspension().note_failed();
    return false;
  }
  operation->suspension().add(partition, landed);
  return true;
}

// Runs on the loop's thread, which registered it. It is not a part of finish(), which runs once for each partition.
[[gnu::noinline]] void Portion::release_memory() {
  if (output && lies_in_place() && !output->is_current()) operation->completion.mark_given_back();
  if (output && route == Route::kDeviceDirect) show_to_device();
  input.reset();
  output.reset();
}

// Makes the GPU see what RDMA devices have written to its memory. Also where the operation fails: nothing changes there
// when the caller has been told.
void Portion::show_to_device() {
  const device::Device& device = operation->on_device->device;
  const device::cuda::Result result = device.flush_rdma_writes();
  if (result == device::cuda::kSuccess) return;
  log_warning(device.refusal("to wait for what an RDMA device has written", result).what());
  operation->completion.mark_unseen();
}

void Portion::finish(std::uint32_t count, bool answered, Counters& counters) {
  unfinished -= count;
  if (pace != kNoPace) operation->paces[pace].note_answered(count);
  if (unfinished == 0) [[unlikely]]
    release_memory();
  if (!answered) operation->completion.mark_incomplete();
  worker::finish(*operation, count, counters);
}

}  // namespace bps::worker
