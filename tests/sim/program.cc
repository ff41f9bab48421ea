// SPDX-License-Identifier: Apache-2.0
#include "program.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/round_numbers.h"

namespace bps::sim {
namespace {

constexpr std::uint64_t kElement = 4;
constexpr auto kMostWait = std::chrono::seconds(1);         // for grants
constexpr auto kMostSleep = std::chrono::milliseconds(10);  // of a thread that starts a call
constexpr double kNoHurry_s = 1000;                         // longer than any fault lasts

}  // namespace

Program::Program(const Shape& shape, Network& network, std::uint64_t identity)
    : shape_(shape), network_(network), identity_(identity), calls_(shape.tensors.size()) {}

void Program::begin(View& view) {
  check_returned();
  view_ = &view;
  why_lost_.clear();
  std::vector<std::uint64_t> members;
  for (std::uint32_t rank = 0; rank < view.membership.workers; ++rank) {
    members.push_back(view.membership.worker(rank)->identity);
  }
  const bool may_go_on = shape_.failover && members == members_;
  members_ = std::move(members);
  rank_ = view.rank();
  granted_ = 0;
  waits_for_grants_ = false;
  if (step_ == shape_.steps) {  // its last step was committed, and then the view ended
    state_ = State::kThrough;
    return;
  }
  has_raised_ = state_ == State::kFailed;
  if (!may_go_on) begin_era();
  if (shape_.failover && view.epoch() > 1) state_ = State::kResuming;
}

void Program::begin_era() {
  for (Call& call : calls_) {
    if (!call.operation) continue;
    call.operation->suspension().resolve(worker::Resumption::kAborted);
    note_returned(call);
    call.operation.reset();
    call.failed.clear();
  }
  era_ = view_->epoch();
  first_.assign(calls_.size(), 0);
  next_.assign(calls_.size(), 0);
  waits_for_grants_ = network_.random.chance(0.5);
  begin_step();
}

void Program::begin_step() {
  check_returned();
  state_ = State::kRunning;
  open_ = 0;
  to_start_.clear();
  // Ranks that wait for one call before they make another have to agree on the order; others need not.
  const bool any_order = shape_.open_calls >= calls_.size();
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    calls_[i].passes = 0;
    calls_[i].is_suspended = false;
    const std::uint64_t drawn = any_order ? network_.random.next() : mix(step_ * 100 + i);
    to_start_.insert(to_start_.begin() + static_cast<std::ptrdiff_t>(drawn % (i + 1)), i);
  }
  next_start_ = network_.events.now() + network_.random.between({}, std::chrono::milliseconds(2));
}

bool Program::turn() {
  if (!why_lost_.empty() && open_ == 0 && (state_ == State::kRunning || state_ == State::kAtEndOfStep)) {
    fail(why_lost_);
  }
  if (state_ == State::kResuming) return resume();
  if (state_ != State::kRunning) return false;
  if (network_.random.chance(0.05)) check_returned();
  if (waits_for_grants_) {
    if (!view_->has_slots() && network_.events.now() < next_start_ + kMostWait) return false;
    waits_for_grants_ = false;
    granted_ = view_->has_slots() ? view_->slots() : 0;
  }
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].operation && calls_[i].operation->is_done()) end(i);
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
  bool started = to_start_.size() < before;
  for (std::size_t i = 0; i < calls_.size(); ++i) started |= ask(i);
  return started;
}

Time Program::next_start() const {
  if (state_ != State::kRunning || !why_lost_.empty()) return Time::max();
  Time next = waits_for_grants_ ? next_start_ + kMostWait : next_start_;
  for (const Call& call : calls_) {
    if (call.asks && !view_->placements->is_open()) next = std::min(next, call.asks_at);
  }
  return next;
}

void Program::end_shift(const van::EndShift& shift) {
  view_->placements->end(shift);
  shifts_ = view_->placements->done();
  // A thread may sleep while a shift comes and goes, but not through two of them.
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].asks && shifts_ - calls_[i].asks_after == worker::Tensor::kShifts - 2) calls_[i].asks_at = {}, ask(i);
  }
}

void Program::lose(const std::string& why) {
  why_lost_ = why;
  for (Call& call : calls_) {
    if (!std::exchange(call.asks, std::nullopt)) continue;
    note_returned(call);
    --open_;
  }
}

void Program::start(std::size_t which) {
  Call& call = calls_[which];
  const std::shared_ptr<worker::Tensor>& tensor = view_->tensors[which];
  call.round = next_[which]++;
  worker::Request request;
  request.kind = shape_.tensors[which].kind;
  request.root = call.round % static_cast<std::uint32_t>(members_.size());
  const bool is_hasty = call.failures == 0 && network_.random.chance(shape_.hasty);
  request.timeout_s = is_hasty ? 1e-3 * static_cast<double>(network_.random.below(400)) : kNoHurry_s;
  const tensor::Partitioning& shards = tensor->sharded;
  const std::uint64_t own = shards.shard_length(rank_);
  const bool gathers = request.kind == tensor::OperationKind::kAllGather;
  const bool scatters = request.kind == tensor::OperationKind::kReduceScatter;
  const std::uint64_t from = gathers ? shards.shard_offset(rank_) / kElement : 0;
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
  request.survives_servers = shape_.failover;
  if (view_->placements) {
    if (worker::take_round(*tensor, request) != call.round) throw Violation("the rounds of a tensor are counted twice");
    call.asks = request;
    call.asks_at = network_.events.now();
    call.asks_after = view_->placements->done();
    if (network_.random.chance(0.3)) call.asks_at += network_.random.between({}, kMostSleep);
  } else {
    launch(call, tensor, request, call.round - first_[which]);
  }
  ++open_;
  network_.trace.note("start", identity_, which, call.round);
}

// As worker::Worker goes on when it has taken a round. Its deadline counts from here on.
bool Program::ask(std::size_t which) {
  Call& call = calls_[which];
  if (!call.asks || call.asks_at > network_.events.now() || view_->placements->is_open()) return false;
  const worker::Request request = *std::exchange(call.asks, std::nullopt);
  const std::shared_ptr<worker::Tensor>& tensor = view_->tensors[which];
  auto plans = view_->placements->plans_of(*tensor, request, call.round);
  moved_ = view_->placements->moved();
  network_.trace.note("placed", identity_, which, plans ? plans->shift : 0);
  launch(call, tensor, request, call.round, {}, std::move(plans));
  return true;
}

// `round` of the tensor in this view; `only`: these partitions.
void Program::launch(Call& call, const std::shared_ptr<worker::Tensor>& tensor, const worker::Request& request,
                     std::uint32_t round, std::span<const worker::Begun> only,
                     std::shared_ptr<const worker::Plans> plans) {
  call.operation = std::make_shared<worker::Operation>(tensor, request, round, sequence_++, 1, view_->places(), only,
                                                       std::move(plans));
  view_->worker_loop->submit(call.operation, true);
}

void Program::note_returned(Call& call) {
  call.input.check_margin();
  call.input.note_returned();
  if (call.output.bytes.empty()) return;
  call.output.check_margin();
  call.output.note_returned();
}

std::optional<Error> Program::failure_of(const worker::Operation& operation) {
  try {
    operation.rethrow();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

void Program::fail(const std::string& why) {
  state_ = State::kFailed;
  why_failed_ = why;
}

void Program::end(std::size_t which) {
  Call& call = calls_[which];
  next_start_ = std::min(next_start_, network_.events.now());
  if (call.operation->is_suspended()) {  // its memory is not the caller's yet
    call.is_suspended = true;
    state_ = State::kInterrupted;
    return;
  }
  const std::optional<Error> failure = failure_of(*call.operation);
  if (!failure) return complete(which);
  call.operation.reset();
  --open_;
  note_returned(call);
  network_.trace.say("failed", identity_, failure->what());
  switch (failure->code()) {
    case ErrorCode::kTimeout:  // on all ranks, which then call it again
      if (shape_.hasty == 0) throw Violation(std::string("no call had a deadline that could pass: ") + failure->what());
      fail_late(which);
      break;
    case ErrorCode::kRoundAborted: state_ = State::kInterrupted; break;
    case ErrorCode::kPeerLost: fail(failure->what()); break;
    default: throw Violation(std::string("an error that nothing can have caused: ") + failure->what());
  }
}

void Program::fail_late(std::size_t which) {
  Call& call = calls_[which];
  outcomes_[{era_, static_cast<std::uint32_t>(which), call.round}] = false;
  if (++call.failures > 20 * shape_.workers) throw Violation("a call fails over and over");
  call.failed.push_front(call.round);
  to_start_.push_back(which);
}

void Program::complete(std::size_t which) {
  Call& call = calls_[which];
  network_.trace.note("complete", identity_, which, call.round);
  check_result(which);
  note_returned(call);
  outcomes_[{era_, static_cast<std::uint32_t>(which), call.round}] = true;
  call.operation.reset();
  --open_;
  call.failures = 0;
  if (++call.passes < shape_.passes) to_start_.push_back(which);
}

void Program::commit() {
  ++committed_[era_];
  if (++step_ == shape_.steps) {
    check_returned();
    state_ = State::kThrough;
  } else {
    begin_step();
  }
}

}  // namespace bps::sim
