// SPDX-License-Identifier: Apache-2.0
#include "worker/worker.h"

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "tensor/operation_names.h"
#include "worker/round_numbers.h"

namespace bps::worker {
namespace {

void require_direct(const WorkerOptions& options) {
  if (options.hosts.active()) {
    throw Error(ErrorCode::kInvalidArgument, "the ranks of each host sum first, and no rank can add to weights alone",
                "set BPS_ASYNC=1, or BPS_HOST_SUM=0, in all processes of the job");
  }
}

// Throws when ranks disagree about the tensor.
void check_valid(const Tensor& tensor) {
  if (tensor.failed.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kMismatch, tensor.why_failed, kDeclareAlike);
  }
}

Request without_memory(Request request) {
  request.input = request.output = nullptr;
  request.input_allocation = request.output_allocation = {};
  return request;
}

// Notes what the streams of a device's arrays have reached now. It comes before the round, since an array that is
// refused takes no part in one.
std::array<device::Ready, 2> take_points(const Tensor& tensor, const Request& request, const DeviceMemory& memory) {
  std::array<device::Ready, 2> points;
  const auto& [source, target] = memory.streams;
  try {
    if (source != 0) points[0] = memory.device->record(source);
    if (target != 0 && target != source) points[1] = memory.device->record(target);
  } catch (const Error& error) {
    throw Error(error.code(), std::string(worker::name_of(request.kind)) + " of '" + tensor.name + "': " + error.what(),
                error.hint());
  }
  return points;
}

}  // namespace

Worker::Worker(WorkerOptions options, van::Van& van)
    : options_(std::move(options)),
      planner_(options_, van),
      declarations_(options_, van, planner_, loops_.all(), recorder_, view_end_),
      news_(van, options_.hosts, loops_, planner_, declarations_, view_end_) {}

void Worker::add_loop(WorkerLoop* worker_loop, std::span<const std::size_t> connected) {
  loops_.add(worker_loop);
  worker_loop->reactor().call([&] {  // it runs already
    worker_loop->events.when_failing = [this, worker_loop](const std::shared_ptr<Operation>& operation) {
      cancel(operation, worker_loop);
    };
    news_.follow(*worker_loop);
  });
  planner_.add_loop(connected);
}

void Worker::cancel(const std::shared_ptr<Operation>& operation, const WorkerLoop* except) {
  if (const ErrorCode code = operation->failure()->code(); code != ErrorCode::kNotInitialized) {
    failed_.add(operation, sequence_.load());
    if (on_failure && code != ErrorCode::kRoundAborted) on_failure();
  }
  loops_.tell([operation](WorkerLoop& loop) { loop.cancel(*operation); }, except);
}

void Worker::abort(const std::shared_ptr<Operation>& operation, ErrorCode code, const std::string& what,
                   const std::string& hint) {
  if (operation->fail(code, what, hint)) cancel(operation, nullptr);
}

bool Worker::end_operations(ErrorCode code, const std::string& what, const std::string& hint,
                            const Deadline& deadline) {
  const Error why(code, what, hint);
  news_.leave(why);
  for (WorkerLoop* each : loops_.all()) each->reactor().call([&] { each->leave(why); });
  const auto idle = [this] {
    return std::ranges::all_of(loops_.all(), [](WorkerLoop* each) {
      bool is_idle = false;
      each->reactor().call([&] { is_idle = each->is_idle(); });
      return is_idle;
    });
  };
  while (!idle()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the end of a job
  }
  return true;
}

std::shared_ptr<Operation> Worker::resume(const std::shared_ptr<Tensor>& tensor, const Operation& suspended,
                                          std::uint32_t round, std::span<const std::uint32_t> only) {
  require_alive(*tensor, suspended.request.kind);
  const auto operation =
      make_operation(tensor, suspended.request, round, sequence_.fetch_add(1), suspended.suspension().begun(only));
  if (const DeviceArrays* arrays = suspended.on_device.get(); arrays != nullptr) {
    operation->on_device = std::make_unique<DeviceArrays>(arrays->device);
    operation->on_device->ready = arrays->ready;
  }
  suspended.suspension().continue_by([&] {
    launch(operation, false);
    return operation;
  });
  return operation;
}

// Launches an operation that has failed before. Nothing of it is sent, and the servers are told to fail the round.
void Worker::refuse(const std::shared_ptr<Tensor>& tensor, const Operation& late, std::uint32_t round,
                    const std::string& why) {
  const auto operation = make_operation(tensor, without_memory(late.request), round, sequence_.fetch_add(1));
  const Error error = given_up_elsewhere("", why);
  (void)operation->fail(error.code(), why, error.hint());
  launch(operation, false);
}

std::shared_ptr<Operation> Worker::start(const std::shared_ptr<Tensor>& declared, const Request& request,
                                         const DeviceMemory& memory, bool wakes) {
  const bool is_stored = request.kind >= tensor::OperationKind::kStore && !tensor::is_feedback(request.kind);
  if (is_stored) require_direct(options_);
  const auto tensor = request.kind == tensor::OperationKind::kAccumulate ? declarations_.alone(*declared) : declared;
  require_alive(*tensor, request.kind);
  std::unique_ptr<DeviceArrays> on_device;
  if (memory.device != nullptr) {
    auto points = take_points(*tensor, request, memory);
    on_device = std::make_unique<DeviceArrays>(*memory.device);
    on_device->ready = std::move(points);
  }
  const std::uint32_t round = take_round(*tensor, request);
  Request what = request;
  if (what.kind == tensor::OperationKind::kAccumulate) count_tries(*tensor, what, round);
  auto plans = planner_.of_round(*tensor, what, round);
  auto operation = make_operation(tensor, what, round, sequence_.fetch_add(1), {}, std::move(plans));
  operation->on_device = std::move(on_device);
  launch(operation, request.awaited, wakes);
  return operation;
}

// Only an operation of a single loop is used again. Nothing of an earlier round can be under way to a loop then except
// what that loop takes in order.
void Worker::start(PreparedOperation& prepared, bool awaited) {
  std::shared_ptr<Operation>& operation = prepared.current;
  if (operation && !operation->is_done()) {
    throw Error(ErrorCode::kInvalidArgument, operation->describe() + " is still in progress",
                "wait for a prepared operation before you start it again");
  }
  require_alive(*prepared.tensor, prepared.request.kind);
  const DeviceMemory& memory = prepared.memory;
  std::array<device::Ready, 2> ready;
  if (memory.device != nullptr) ready = take_points(*prepared.tensor, prepared.request, memory);
  const std::uint32_t round = take_round(*prepared.tensor, prepared.request);
  auto plans = planner_.of_round(*prepared.tensor, prepared.request, round);
  const std::uint64_t sequence = sequence_.fetch_add(1);
  const bool reusable =
      operation && operation->completion.progress && operation->plans == plans && operation->rearm(round, sequence);
  if (!reusable) {
    operation = make_operation(prepared.tensor, prepared.request, round, sequence, {}, std::move(plans));
    if (memory.device != nullptr) operation->on_device = std::make_unique<DeviceArrays>(*memory.device);
  }
  if (operation->on_device) operation->on_device->ready = std::move(ready);
  try {
    launch(operation, awaited);
  } catch (const Error&) {
    // The loop that watches the operation since an earlier round will never get this one, and must not wait for it when
    // the job ends.
    loops_.forgo(std::exchange(operation, nullptr), 1);
    throw;
  }
}

std::shared_ptr<Operation> Worker::make_operation(const std::shared_ptr<Tensor>& tensor, const Request& request,
                                                  std::uint32_t round, std::uint64_t sequence,
                                                  std::span<const Begun> only, std::shared_ptr<const Plans> plans) {
  Request what = request;
  what.op = exact_op(what.op, what.kind, tensor->exactness);
  const bool is_compressed = tensor->compressor && tensor->compressor->applies(what.kind, what.op);
  what.survives_servers &= options_.survives_servers && what.kind < tensor::OperationKind::kSplit && !is_compressed;
  if (options_.survives_servers && request.survives_servers && !what.survives_servers) has_one_phase_.store(true);
  auto operation = std::make_shared<Operation>(tensor, what, round, sequence, loops_.count(), planner_.places().count(),
                                               only, std::move(plans));
  if (operation->loop != Operation::kSeveral) {
    operation->completion.progress = loops_.first_of(*operation).reactor().progress();
  }
  return operation;
}

void Worker::launch(const std::shared_ptr<Operation>& operation, bool awaited, bool wakes) {
  const auto fail = [&](const Error& error) { abort(operation, error.code(), error.what(), error.hint()); };
  // A caller may start several before it waits for the first. While it works for one loop, others must not sleep on
  // what it has given them: other ranks may wait for that first.
  const bool is_alone = !awaited || loops_.count() == 1 || loops_.have_ended(sequence_.load() - 1);
  loops_.submit(operation, !wakes || (awaited && is_alone), fail);
  if (!is_alone) loops_.wake();
  const Tensor& tensor = *operation->tensor;
  const GoneMembers& gone = news_.gone();
  if (!gone.is_any() && !tensor.failed.load()) return;
  try {  // looks at what has happened between the check and the submission
    check_valid(tensor);
    gone.check_lost(tensor);
  } catch (const Error& error) {
    fail(error);
  }
}

void Worker::require_alive(const Tensor& tensor, tensor::OperationKind kind) {
  try {
    check_valid(tensor);
    news_.gone().check(tensor, kind);
    if (view_end_->is_known()) throw Error(view_end_->error());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotInitialized) {
      failed_.note_refusal(error.what(), sequence_.load());
      if (on_failure) on_failure();
    }
    throw;
  }
}

void Worker::forget_memory(std::uint64_t identity) {
  loops_.tell([identity](WorkerLoop& loop) { loop.forget_memory(identity); });
}

}  // namespace bps::worker
