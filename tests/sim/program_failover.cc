// SPDX-License-Identifier: Apache-2.0
// How a program goes on in the next view: Job.go_on() in bps_rdma/job.py, and failover.resume().
#include <algorithm>
#include <cstring>
#include <utility>

#include "program.h"

namespace bps::sim {
namespace {

constexpr std::uint32_t kExchange = 900;  // the numbers of the tensors
constexpr std::uint32_t kGifts = 901;
constexpr std::uint32_t kEndOfGifts = 902;
constexpr std::uint32_t kRepeats = 1000;  // and, with its round, of those of which something is summed again
constexpr std::uint32_t kWords = sizeof(Report) / 4;
constexpr double kNoHurry_s = 1000;

}  // namespace

void Program::collect() {
  exchange_.operation.reset();
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (!calls_[i].operation || calls_[i].is_suspended) continue;
    if (!calls_[i].operation->is_done()) throw Violation("a call outlives its view");
    end(i);
  }
}

// Tells the others what this rank has and lacks; when it has heard all of them it does what follows.
bool Program::resume() {
  if (!why_lost_.empty()) return fail(why_lost_), false;
  if (!exchange_.operation) return exchange(), true;
  if (!exchange_.operation->is_done()) return false;
  const std::shared_ptr<worker::Operation> operation = std::exchange(exchange_.operation, nullptr);
  note_returned(exchange_);
  const std::optional<Error> failure = failure_of(*operation);
  if (!failure) return hear(), true;
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
      for (const auto& [partition, bytes] : calls_[i].operation->suspension().missing()) {
        if (partition >= kMostPartitions) throw Violation("a shape with more partitions than a report has places");
        report.missing |= 1U << partition;
        report.have[partition] = static_cast<std::uint32_t>(bytes);
      }
      for (const auto& whole : calls_[i].operation->suspension().whole()) report.whole |= 1U << whole.partition;
    }
    for (std::size_t k = 0; k < std::min(calls_[i].failed.size(), std::size(report.failed)); ++k) {
      report.failed[k] = calls_[i].failed[k] + 1;
    }
    mine.push_back(report);
  }
  std::vector<std::byte> bytes(4 * kWords * mine.size());
  std::memcpy(bytes.data(), mine.data(), bytes.size());
  stage_ = Exchange::kReports;
  gather(kExchange, "exchange", bytes);
}

// What each rank passes, which has the same length on all of them.
void Program::gather(std::uint32_t number, const char* name, const std::vector<std::byte>& mine) {
  const auto tensor = view_->make_tensor(number, name, mine.size() / 4 * members_.size());
  exchange_.input.make(mine.size(), ++allocations_);
  exchange_.output.make(tensor->bytes, ++allocations_);
  std::memcpy(exchange_.input.data(), mine.data(), mine.size());
  std::memcpy(exchange_.output.data() + mine.size() * rank_, mine.data(), mine.size());
  worker::Request request;
  request.kind = tensor::OperationKind::kAllGather;
  request.timeout_s = kNoHurry_s;
  request.input = exchange_.input.data();
  request.output = exchange_.output.data();
  request.input_allocation = {exchange_.input.bytes, exchange_.input.identity};
  request.output_allocation = {exchange_.output.bytes, exchange_.output.identity};
  launch(exchange_, tensor, request, 0);
}

// Each knows what all do; first of all those who have a part of a result give it to those who lack it.
void Program::hear() {
  if (stage_ == Exchange::kGifts) return take_gifts();
  if (stage_ == Exchange::kEnd) return go_on();
  reports_.resize(calls_.size() * members_.size());
  std::memcpy(reports_.data(), exchange_.output.data(), 4 * kWords * reports_.size());
  if (!can_go_on(reports_, view_->epoch())) return go_on();
  decisions_.assign(calls_.size(), {});
  std::vector<std::byte> gifts;
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (!calls_[i].is_suspended) continue;
    decisions_[i] = decide(reports_of(i), calls_[i].round);
    for (const Decision::Gift& gift : decisions_[i].gifts) {
      std::vector<std::byte> bytes(size_of(i, gift));
      if (gift.rank == rank_) calls_[i].operation->suspension().read(gift.partition, bytes);
      gifts.insert(gifts.end(), bytes.begin(), bytes.end());
    }
  }
  if (gifts.empty()) return go_on();
  stage_ = Exchange::kGifts;
  gather(kGifts, "gifts", gifts);
}

std::vector<Report> Program::reports_of(std::size_t which) const {
  std::vector<Report> found;
  for (std::size_t rank = 0; rank < members_.size(); ++rank) found.push_back(reports_[rank * calls_.size() + which]);
  return found;
}

std::uint64_t Program::size_of(std::size_t which, const Decision::Gift& gift) const {
  const worker::Operation& operation = *calls_[which].operation;
  return gift.bytes.value_or(operation.suspension().length(gift.partition));
}

void Program::take_gifts() {
  const std::uint64_t all = exchange_.input.bytes.size() - 2 * Block::kMargin;
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (!calls_[i].is_suspended) continue;
    for (const Decision::Gift& gift : decisions_[i].gifts) {
      const std::uint64_t size = size_of(i, gift);
      calls_[i].operation->suspension().write(gift.partition, {exchange_.output.data() + gift.rank * all + at, size});
      at += size;
      ++gifts_;
    }
  }
  // Nobody goes on, and perhaps lets go of what it has, before all have what they lacked.
  stage_ = Exchange::kEnd;
  gather(kEndOfGifts, "end of gifts", std::vector<std::byte>(4));
}

void Program::go_on() {
  state_ = State::kRunning;
  next_start_ = network_.events.now();
  if (!can_go_on(reports_, view_->epoch())) return era_ == view_->epoch() ? void() : begin_era();
  if (has_raised_) throw Violation("a call has raised, and its job goes on: " + why_failed_);
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    first_[i] = first_round(reports_of(i));
    for (const std::uint32_t round : calls_[i].failed) {
      if (round >= first_[i]) refuse(i, round);
    }
    if (std::exchange(calls_[i].is_suspended, false)) go_on(i, decisions_[i]);
  }
}

void Program::go_on(std::size_t which, const Decision& decision) {
  using worker::Resumption;
  Call& call = calls_[which];
  const std::shared_ptr<worker::Operation> suspended = call.operation;
  network_.trace.note("goes on", identity_, which, static_cast<std::uint64_t>(decision.fate));
  ++resumed_;
  if (decision.fate == Decision::Fate::kAborted) {
    throw Violation("a rank has completed a call, and another one lacks its result: " + suspended->describe());
  }
  if (decision.fate == Decision::Fate::kFailed) {
    suspended->abort_suspended(Error(ErrorCode::kTimeout, "its deadline has passed on another rank", ""));
    if (call.round >= first_[which]) refuse(which, call.round);
    call.operation.reset();
    --open_;
    note_returned(call);
    return fail_late(which);
  }
  const auto continue_by = [&](const auto& tensor, std::uint32_t round, const std::vector<worker::Begun>& only) {
    suspended->suspension().continue_by([&] {
      launch(call, tensor, suspended->request, round, only);
      return call.operation;
    });
  };
  if (decision.fate == Decision::Fate::kAgain) {
    return continue_by(view_->tensors[which], call.round - first_[which], {});
  }
  suspended->suspension().take_landed();
  if (decision.partitions.empty()) {
    suspended->suspension().resolve(Resumption::kComplete);
    return complete(which);
  }
  const std::uint32_t number = kRepeats * static_cast<std::uint32_t>(which + 1) + call.round;
  const auto tensor = view_->make_tensor(number, "repeat", shape_.tensors[which].elements);
  continue_by(tensor, 0, suspended->suspension().begun(decision.partitions));
}

// Worker::refuse(): who has not begun what has failed would wait for the others.
void Program::refuse(std::size_t which, std::uint32_t round) {
  worker::Request request;
  request.kind = shape_.tensors[which].kind;
  request.root = round % static_cast<std::uint32_t>(members_.size());
  request.survives_servers = true;
  const auto refused = std::make_shared<worker::Operation>(view_->tensors[which], request, round - first_[which],
                                                           sequence_++, 1, view_->places());
  (void)refused->fail(ErrorCode::kTimeout, "its deadline has passed on another rank", "");
  view_->worker_loop->submit(refused, true);
}

}  // namespace bps::sim
