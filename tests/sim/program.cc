// SPDX-License-Identifier: Apache-2.0
#include "program.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace bps::sim {
namespace {

constexpr std::uint64_t kElement = 4;
constexpr auto kMostWait = std::chrono::seconds(1);  // for grants
constexpr double kNoHurry_s = 1000;                  // longer than any fault lasts

}  // namespace

void Program::Block::make(std::uint64_t size, std::uint64_t number) {
  bytes.assign(size + 2 * kMargin, std::byte{0xee});
  returned.clear();
  identity = number;
}

void Program::Block::check_margin() const {
  const auto is_untouched = [](std::byte one) { return one == std::byte{0xee}; };
  if (!std::all_of(bytes.begin(), bytes.begin() + kMargin, is_untouched) ||
      !std::all_of(bytes.end() - kMargin, bytes.end(), is_untouched)) {
    throw Violation("a byte beside the caller's memory has changed");
  }
}

Program::Program(const Shape& shape, Network& network, std::uint64_t identity)
    : shape_(shape), network_(network), identity_(identity), calls_(shape.tensors.size()) {}

void Program::begin(View& view) {
  check_returned();
  view_ = &view;
  why_lost_.clear();
  if (step_ == shape_.steps) {  // its last step was committed, and then the view ended
    state_ = State::kThrough;
    return;
  }
  state_ = State::kRunning;
  open_ = 0;
  if (std::exchange(in_view_, view.epoch()) != view.epoch()) {
    granted_ = 0;
    waits_for_grants_ = network_.random.chance(0.5);
  }
  to_start_.clear();
  // Ranks that wait for one call before they make another have to agree on the order; others need not.
  const bool any_order = shape_.open_calls >= calls_.size();
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    calls_[i].complete = false;
    calls_[i].operation.reset();
    const std::uint64_t drawn = any_order ? network_.random.next() : mix(step_ * 100 + i);
    to_start_.insert(to_start_.begin() + static_cast<std::ptrdiff_t>(drawn % (i + 1)), i);
  }
  next_start_ = network_.events.now() + network_.random.between({}, std::chrono::milliseconds(2));
}

bool Program::turn() {
  if (!why_lost_.empty() && open_ == 0 && (state_ == State::kRunning || state_ == State::kAtEndOfStep)) {
    state_ = State::kFailed;
    why_failed_ = why_lost_;
  }
  if (state_ != State::kRunning) return false;
  if (network_.random.chance(0.05)) check_returned();
  if (waits_for_grants_) {
    if (!view_->has_slots() && network_.events.now() < next_start_ + kMostWait) return false;
    waits_for_grants_ = false;
    granted_ = view_->has_slots() ? view_->slots() : 0;
  }
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].operation && calls_[i].operation->done()) end(i);
    if (state_ != State::kRunning) return false;
  }
  const std::size_t before = to_start_.size();
  while (why_lost_.empty() && !to_start_.empty() && open_ < shape_.open_calls && next_start_ <= network_.events.now()) {
    const std::size_t tensor = to_start_.back();
    to_start_.pop_back();
    start(tensor);
    next_start_ = network_.events.now() + network_.random.between({}, std::chrono::microseconds(200));
  }
  if (to_start_.empty() || open_ == shape_.open_calls) next_start_ = Time::max();
  if (to_start_.empty() && open_ == 0) state_ = State::kAtEndOfStep;
  return to_start_.size() < before;
}

std::uint32_t Program::contribution(std::uint64_t identity, std::size_t tensor, std::uint32_t round,
                                    std::uint64_t element) const {
  const std::uint64_t first = mix(mix(identity * 1000 + tensor) ^ (std::uint64_t{view_->epoch()} << 32 | round));
  return static_cast<std::uint32_t>(first + element * ((first >> 40) | 1));
}

bool Program::has_one_block(std::size_t tensor) const {
  const TensorShape& shape = shape_.tensors[tensor];
  return shape.kind == tensor::OperationKind::kBroadcast ||
         (shape.kind == tensor::OperationKind::kPushPull && shape.in_place);
}

void Program::start(std::size_t which) {
  Call& call = calls_[which];
  const std::shared_ptr<worker::Tensor>& tensor = view_->tensors[which];
  call.round = tensor->next_round.fetch_add(1);
  worker::Request request;
  request.kind = shape_.tensors[which].kind;
  request.root = call.round % view_->membership.workers;
  const bool is_hasty = call.failures == 0 && network_.random.chance(shape_.hasty);
  request.timeout_s = is_hasty ? 1e-3 * static_cast<double>(network_.random.below(400)) : kNoHurry_s;
  const tensor::Partitioning& shards = tensor->sharded;
  const std::uint64_t own = shards.shard_length(view_->rank());
  const bool gathers = request.kind == tensor::OperationKind::kAllGather;
  const bool scatters = request.kind == tensor::OperationKind::kReduceScatter;
  const std::uint64_t from = gathers ? shards.shard_offset(view_->rank()) / kElement : 0;
  call.input.make(gathers ? own : tensor->bytes, ++allocations_);
  for (std::uint64_t i = 0; i < (call.input.bytes.size() - 2 * Block::kMargin) / kElement; ++i) {
    const std::uint32_t value = contribution(identity_, which, call.round, from + i);
    std::memcpy(call.input.data() + i * kElement, &value, kElement);
  }
  if (has_one_block(which)) {
    call.output.bytes.clear();
    call.output.returned.clear();
  } else {
    call.output.make(scatters ? own : tensor->bytes, ++allocations_);
  }
  Block& output = has_one_block(which) ? call.input : call.output;
  request.input = call.input.data();
  request.output = output.data();
  request.input_allocation = {call.input.bytes, call.input.identity};
  request.output_allocation = {output.bytes, output.identity};
  call.operation =
      std::make_shared<worker::Operation>(tensor, request, call.round, sequence_++, 1, view_->servers.size());
  view_->worker_loop->submit(call.operation, true);
  ++open_;
  network_.trace.note("start", identity_, which, call.round);
}

void Program::end(std::size_t which) {
  Call& call = calls_[which];
  const std::shared_ptr<worker::Operation> operation = std::move(call.operation);
  call.operation.reset();
  --open_;
  next_start_ = std::min(next_start_, network_.events.now());
  const auto note = [&] {
    call.input.check_margin();
    call.input.note_returned();
    if (call.output.bytes.empty()) return;
    call.output.check_margin();
    call.output.note_returned();
  };
  try {
    operation->rethrow();
    network_.trace.note("complete", identity_, which, call.round);
    check_result(which);
    note();
    outcomes_[{view_->epoch(), static_cast<std::uint32_t>(which), call.round}] = true;
    call.complete = true;
    call.failures = 0;
  } catch (const Error& error) {
    note();
    network_.trace.say("failed", identity_, error.what());
    switch (error.code()) {
      case ErrorCode::kTimeout:  // on all ranks, which then call it again
        if (shape_.hasty == 0) throw Violation(std::string("no call had a deadline that could pass: ") + error.what());
        outcomes_[{view_->epoch(), static_cast<std::uint32_t>(which), call.round}] = false;
        if (++call.failures > 20 * shape_.workers) throw Violation("a call fails over and over");
        to_start_.push_back(which);
        break;
      case ErrorCode::kRoundAborted: state_ = State::kInterrupted; break;
      case ErrorCode::kPeerLost:
        state_ = State::kFailed;
        why_failed_ = error.what();
        break;
      default: throw Violation(std::string("an error that nothing can have caused: ") + error.what());
    }
  }
}

void Program::check_result(std::size_t which) {
  Call& call = calls_[which];
  const worker::Tensor& tensor = *view_->tensors[which];
  const tensor::OperationKind kind = shape_.tensors[which].kind;
  std::vector<std::uint64_t> identities;
  for (std::uint32_t rank = 0; rank < view_->membership.workers; ++rank) {
    identities.push_back(view_->membership.worker(rank)->identity);
  }
  const auto expected = [&](std::uint64_t element) {
    if (kind == tensor::OperationKind::kBroadcast) {
      return contribution(identities[call.round % identities.size()], which, call.round, element);
    }
    if (kind == tensor::OperationKind::kAllGather) {
      for (std::uint32_t rank = 0; rank < identities.size(); ++rank) {
        const std::uint64_t begin = tensor.sharded.shard_offset(rank) / kElement;
        if (element >= begin && element - begin < tensor.sharded.shard_length(rank) / kElement) {
          return contribution(identities[rank], which, call.round, element);
        }
      }
    }
    std::uint32_t sum = 0;
    for (const std::uint64_t identity : identities) sum += contribution(identity, which, call.round, element);
    return sum;
  };
  Block& output = has_one_block(which) ? call.input : call.output;
  const std::uint64_t from =
      kind == tensor::OperationKind::kReduceScatter ? tensor.sharded.shard_offset(view_->rank()) / kElement : 0;
  for (std::uint64_t i = 0; i < (output.bytes.size() - 2 * Block::kMargin) / kElement; ++i) {
    // The own shard of an all_gather is the caller's to put there.
    if (kind == tensor::OperationKind::kAllGather && !has_one_block(which)) {
      const std::uint64_t begin = tensor.sharded.shard_offset(view_->rank()) / kElement;
      if (i >= begin && i - begin < tensor.sharded.shard_length(view_->rank()) / kElement) continue;
    }
    std::uint32_t value = 0;
    std::memcpy(&value, output.data() + i * kElement, kElement);
    if (value != expected(from + i)) {
      throw Violation("a wrong result: " + tensor.name + ", round " + std::to_string(call.round) + ", element " +
                      std::to_string(from + i) + ", on the rank of process " + std::to_string(identity_));
    }
  }
  if (has_one_block(which)) return;
  for (std::uint64_t i = 0; i < (call.input.bytes.size() - 2 * Block::kMargin) / kElement; ++i) {
    const std::uint64_t begin =
        kind == tensor::OperationKind::kAllGather ? tensor.sharded.shard_offset(view_->rank()) / kElement : 0;
    std::uint32_t value = 0;
    std::memcpy(&value, call.input.data() + i * kElement, kElement);
    if (value != contribution(identity_, which, call.round, begin + i)) throw Violation("an input has changed");
  }
}

void Program::commit() {
  ++committed_[view_->epoch()];
  if (++step_ == shape_.steps) {
    state_ = State::kThrough;
  } else {
    begin(*view_);
  }
}

void Program::check_returned() const {
  for (const Call& call : calls_) {
    for (const Block* block : {&call.input, &call.output}) {
      if (block->returned.empty() || block->returned == block->bytes) continue;
      throw Violation("memory of process " + std::to_string(identity_) + " has changed after the call had ended");
    }
  }
}

}  // namespace bps::sim
