// SPDX-License-Identifier: Apache-2.0
// How a program goes on in the next view: Job.go_on() in bps_rdma/job.py, and failover.resume().
#include <algorithm>
#include <cstring>
#include <utility>

#include "program.h"

namespace bps::sim {
namespace {

constexpr std::uint32_t kExchange = 900;  // the number of the tensor
constexpr std::uint32_t kRepeats = 1000;  // and, with its round, of those of which something is summed again
constexpr std::uint32_t kWords = sizeof(Report) / 4;
constexpr double kNoHurry_s = 1000;

}  // namespace

void Program::collect() {
  exchange_.operation.reset();
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (!calls_[i].operation || calls_[i].is_suspended) continue;
    if (!calls_[i].operation->done()) throw Violation("a call outlives its view");
    end(i);
  }
}

// Tells the others what this rank has and lacks; when it has heard all of them it does what follows.
bool Program::resume() {
  if (!why_lost_.empty()) return fail(why_lost_), false;
  if (!exchange_.operation) return exchange(), true;
  if (!exchange_.operation->done()) return false;
  const std::shared_ptr<worker::Operation> operation = std::exchange(exchange_.operation, nullptr);
  note_returned(exchange_);
  const std::optional<Error> failure = failure_of(*operation);
  if (!failure) return go_on(), true;
  network_.trace.say("failed", identity_, failure->what());
  if (failure->code() != ErrorCode::kRoundAborted) return fail(failure->what()), false;
  state_ = State::kInterrupted;
  return false;
}

void Program::exchange() {
  std::vector<Report> mine;
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    Report report{.since = era_, .next = next_[i]};
    if (calls_[i].is_suspended) {
      report.interrupted = calls_[i].round + 1;
      report.is_late = failure_of(*calls_[i].operation)->code() == ErrorCode::kTimeout ? 1 : 0;
      for (const std::uint32_t partition : calls_[i].operation->missing()) report.missing |= 1U << partition;
    }
    for (std::size_t k = 0; k < std::min(calls_[i].failed.size(), std::size(report.failed)); ++k) {
      report.failed[k] = calls_[i].failed[k] + 1;
    }
    mine.push_back(report);
  }
  const std::uint64_t words = kWords * mine.size();
  const auto tensor = view_->make_tensor(kExchange, "exchange", words * members_.size());
  exchange_.input.make(4 * words, ++allocations_);
  exchange_.output.make(tensor->bytes, ++allocations_);
  std::memcpy(exchange_.input.data(), mine.data(), 4 * words);
  std::memcpy(exchange_.output.data() + 4 * words * rank_, mine.data(), 4 * words);
  worker::Request request;
  request.kind = tensor::OperationKind::kAllGather;
  request.timeout_s = kNoHurry_s;
  request.input = exchange_.input.data();
  request.output = exchange_.output.data();
  request.input_allocation = {exchange_.input.bytes, exchange_.input.identity};
  request.output_allocation = {exchange_.output.bytes, exchange_.output.identity};
  launch(exchange_, tensor, request, 0);
}

void Program::go_on() {
  state_ = State::kRunning;
  next_start_ = network_.events.now();
  std::vector<Report> reports(calls_.size() * members_.size());
  std::memcpy(reports.data(), exchange_.output.data(), 4 * kWords * reports.size());
  if (!can_go_on(reports, view_->epoch())) return era_ == view_->epoch() ? void() : begin_era();
  if (has_raised_) throw Violation("a call has raised, and its job goes on: " + why_failed_);
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    std::vector<Report> of_tensor;
    for (std::size_t rank = 0; rank < members_.size(); ++rank) of_tensor.push_back(reports[rank * calls_.size() + i]);
    first_[i] = first_round(of_tensor);
    for (const std::uint32_t round : calls_[i].failed) {
      if (round >= first_[i]) refuse(i, round);
    }
    if (std::exchange(calls_[i].is_suspended, false)) go_on(i, decide(of_tensor, calls_[i].round));
  }
}

void Program::go_on(std::size_t which, const Decision& decision) {
  using Resumption = worker::Operation::Resumption;
  Call& call = calls_[which];
  const std::shared_ptr<worker::Operation> suspended = call.operation;
  network_.trace.note("goes on", identity_, which, static_cast<std::uint64_t>(decision.fate));
  ++resumed_;
  if (decision.fate == Decision::Fate::kAborted) {
    throw Violation("a rank has completed a call, and another one lacks its result: " + suspended->describe());
  }
  if (decision.fate == Decision::Fate::kFailed) {
    suspended->resolve(Error(ErrorCode::kTimeout, "its deadline has passed on another rank", ""));
    if (call.round >= first_[which]) refuse(which, call.round);
    call.operation.reset();
    --open_;
    note_returned(call);
    return fail_late(which);
  }
  if (decision.fate == Decision::Fate::kAgain) {
    launch(call, view_->tensors[which], suspended->request, call.round - first_[which]);
    return suspended->resolve(Resumption::kContinued, call.operation);
  }
  suspended->accept(decision.partitions);
  if (decision.partitions.empty()) {
    suspended->resolve(Resumption::kComplete);
    return complete(which);
  }
  const std::uint32_t number = kRepeats * static_cast<std::uint32_t>(which + 1) + call.round;
  const auto tensor = view_->make_tensor(number, "repeat", shape_.tensors[which].elements);
  launch(call, tensor, suspended->request, 0, decision.partitions);
  suspended->resolve(Resumption::kContinued, call.operation);
}

// Worker::refuse(): who has not begun what has failed would wait for the others.
void Program::refuse(std::size_t which, std::uint32_t round) {
  worker::Request request;
  request.kind = shape_.tensors[which].kind;
  request.root = round % static_cast<std::uint32_t>(members_.size());
  request.two_phase = true;
  const auto refused = std::make_shared<worker::Operation>(view_->tensors[which], request, round - first_[which],
                                                           sequence_++, 1, view_->places());
  (void)refused->fail(ErrorCode::kTimeout, "its deadline has passed on another rank", "");
  view_->worker_loop->submit(refused, true);
}

}  // namespace bps::sim
