// SPDX-License-Identifier: Apache-2.0
#include "worker/operation.h"

#include <algorithm>
#include <utility>

#include "worker/round_numbers.h"

namespace bps::worker {
namespace {

const Plan& plan_of(const Tensor& tensor, const Plans* plans, tensor::OperationKind kind) {
  const Plans& used = plans == nullptr ? tensor.plans : *plans;
  return tensor::is_sharded(kind) ? used.sharded : used.whole;
}

}  // namespace

Operation::Operation(std::shared_ptr<Tensor> declared, const Request& what, std::uint32_t number, std::uint64_t order,
                     std::size_t worker_loops, std::size_t places, std::span<const Begun> only,
                     std::shared_ptr<const Plans> placed, Clock::time_point now)
    : tensor(std::move(declared)),
      plans(std::move(placed)),
      request(what),
      round(number),
      sequence(order),
      deadline(Deadline::after(what.timeout_s, now)),
      layout{{what.kind, what.pushes, tensor->position, what.root}, &tensor->cut(what.kind)},
      continuation(only.empty() ? nullptr
                                : std::make_unique<Continuation>(plan_of(*tensor, plans.get(), what.kind), only)),
      header_(make_header()) {
  const Plan& plan = continuation ? continuation->plan() : plan_of(*tensor, plans.get(), what.kind);
  portions.resize(worker_loops * places);
  if (tensor->ahead != 0 && layout.cut->count() > tensor->ahead) paces = std::make_unique<Pace[]>(worker_loops);
  for (std::size_t i = 0; i < portions.size(); ++i) {
    Portion& portion = portions[i];
    portion.operation = this;
    portion.header = &header_;
    portion.parts = plan[i];
    portion.priority = what.priority;
    portion.input_bytes = what.input;
    portion.output_bytes = what.output;
    portion.finality = what.survives_servers ? Finality::kCommit : Finality::kAnswer;  // until its loop admits it
  }
  loop = find_loop(places);
  begin(shares(worker_loops), now);
}

// Returns the loop to which all partitions belong, as a small tensor's often do. The other loops need not wake up then,
// and a caller that waits can take the place of this one.
std::size_t Operation::find_loop(std::size_t places) const {
  std::size_t found = portions.size() == places ? 0 : kSeveral;
  for (std::size_t i = 0; i < portions.size(); ++i) {
    if (portions[i].parts.empty()) continue;
    if (found != kSeveral && found != i / places) return kSeveral;
    found = i / places;
  }
  return found;
}

Operation::~Operation() {
  delete suspension_.load();
}

// Each worker loop finishes one share more when it has taken the operation in. So the operation cannot complete while a
// worker loop still looks at it.
void Operation::begin(std::uint64_t shares, Clock::time_point now) {
  for (Portion& portion : portions) shares += portion.restart(sequence);
  remaining.store(shares, std::memory_order_relaxed);
  if (tensor->recorder) recording_.begin(*tensor->recorder, sequence, *tensor, request.kind, round, now);
}

// A loop that still has the operation on its list of deadlines may look at it meanwhile. It leaves alone what is over,
// and so finds either that or the new round.
bool Operation::rearm(std::uint32_t new_round, std::uint64_t order) {
  if (!completion.is_reusable()) return false;
  round = new_round;
  sequence = order;
  const auto now = Clock::now();
  deadline = Deadline::after(request.timeout_s, now);
  header_.round = new_round;
  begin(1, now);
  completion.restart();
  return true;
}

bool Operation::fail(ErrorCode code, const std::string& what, const std::string& hint) {
  const bool is_first = failure_.note(Error(code, describe() + ": " + what, hint), [&] {
    if (!completion.begin_failing()) return false;
    if (tensor->compressor) tensor->compressor->note_failure();
    if (request.kind == tensor::OperationKind::kSplit) void_round(*tensor, round);
    if (code == ErrorCode::kRoundAborted && tensor->view_end) tensor->view_end->note(what);
    return true;
  });
  return is_first;
}

void Operation::explain(const std::string& detail) {
  if (!is_done()) failure_.explain(detail);
}

void Operation::rethrow() const {
  if (completion.has_failed()) throw Error(*failure());
}

// Counts before anybody can see that it is over, so that a caller that has waited for it finds it in the counters.
void Operation::end(Counters& counters) {
  // Nothing waits for these points any more, and others can use them, unless the next view goes on with the operation.
  if (on_device && !(completion.is_incomplete() && request.survives_servers)) on_device->ready = {};
  if (completion.is_incomplete()) {
    if (completion.is_given_back()) {
      (void)fail(ErrorCode::kInvalidArgument, "the memory of its result was given back before it was complete",
                 "wait for an operation before you free, resize or unmap its array");
    }
    if (completion.is_unseen()) {
      (void)fail(ErrorCode::kTransport, "the GPU may not see the result that RDMA devices have written to its memory",
                 "see this process's log for the reason, and the kernel log (dmesg) for the state of the GPU");
    }
    (void)fail(ErrorCode::kInternal, "a part of it ended without a reason", "report this as a bug");
    counters.failed.add();
    recording_.end(sequence, FlightRecorder::End::kFailed);
    return completion.end();
  }
  counters.operations.add();
  counters.operation_bytes.add(bytes());
  if (tensor->is_timed) {
    if (const auto took = age(Clock::now())) {
      counters.operation_times.observe(*took);
      const TraceKey key{.group = tensor->group->id, .tensor = tensor->id, .round = round};
      if (counters.trace != nullptr) {
        counters.trace->record(TraceStage::kOperation, key, 0, static_cast<std::uint64_t>(took->count()));
      }
    }
  }
  recording_.end(sequence, FlightRecorder::End::kDone);
  completion.end();
}

bool Operation::is_suspended() const {
  if (!request.survives_servers || !completion.has_failed()) return false;
  const auto why = failure();
  if (!why) return false;
  if (why->code() == ErrorCode::kRoundAborted) return true;
  if (why->code() != ErrorCode::kTimeout || !tensor->view_end || !tensor->view_end->is_known()) return false;
  return !suspension().has_failed();
}

Suspension& Operation::suspension() const {
  Suspension* known = suspension_.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  auto made = std::make_unique<Suspension>(layout, request, on_device.get(), continuation.get());
  if (!suspension_.compare_exchange_strong(known, made.get(), std::memory_order_acq_rel)) return *known;
  return *made.release();
}

void Operation::abort_suspended(const Error& why) {
  failure_.replace(why);
  suspension().resolve(Resumption::kAborted);
}

std::optional<Duration> Operation::age(Clock::time_point now) const {
  if (deadline.at() == Clock::time_point::max()) return std::nullopt;
  return std::max(Duration::zero(), to_duration(request.timeout_s) - Duration(deadline.at() - now));
}

std::string Operation::describe() const {
  return std::string(name_of(request.kind)) + " of '" + tensor->name + "', round " + std::to_string(round);
}

tensor::PushHeader Operation::make_header() const {
  tensor::PushHeader header{};
  header.version = transport::kProtocolVersion;
  header.dtype = tensor::is_feedback(request.kind) ? Dtype::kFloat32 : tensor->dtype;
  header.op = request.op;
  header.flags = request.survives_servers ? tensor::kTwoPhase : 0;  // each partition adds its own
  header.kind = request.kind;
  header.position = tensor->position;
  header.group = tensor->group->id;
  header.tensor = tensor->id;
  header.round = round;
  if (tensor::has_root(request.kind)) header.root = request.root;
  if (request.kind == tensor::OperationKind::kAccumulate) {
    header.add_to(tensor->stored_by);
    header.place = request.addition.place();
  }
  return header;
}

}  // namespace bps::worker
