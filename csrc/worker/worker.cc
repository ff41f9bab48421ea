// SPDX-License-Identifier: Apache-2.0
// Operations, from their start to the loops. Tensors are in worker_tensors.cc, losses and failures in worker_losses.cc.
#include "worker/worker.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

namespace bps::worker {

Worker::Worker(WorkerOptions options, van::Van& van)
    : options_(std::move(options)),
      van_(van),
      places_(options_.key_map, options_.server_places, options_.weights, options_.own_server, options_.hosts, rank()),
      late_connections_(places_.count()),
      gone_(van, options_.hosts) {
  van::Group all;
  for (std::uint32_t rank = 0; rank < van.membership().workers; ++rank) all.ranks.push_back(rank);
  groups_[0] = std::make_shared<const van::Group>(std::move(all));
}

void Worker::add_loop(WorkerLoop* worker_loop, transport::Reactor* reactor, std::span<const std::size_t> connected) {
  worker_loops_.push_back({worker_loop, reactor});
  worker_loop->events.when_failing = [this, worker_loop](const std::shared_ptr<Operation>& operation) {
    cancel(operation, worker_loop);
  };
  late_connections_.add_loop(connected);
}

void Worker::cancel(const std::shared_ptr<Operation>& operation, const WorkerLoop* except) {
  note_failure(operation);
  for (const LoopOf& each : worker_loops_) {
    if (each.worker_loop == except) continue;
    each.reactor->loop().post([worker_loop = each.worker_loop, operation] { worker_loop->cancel(*operation); });
  }
}

void Worker::abort(const std::shared_ptr<Operation>& operation, ErrorCode code, const std::string& what,
                   const std::string& hint) {
  if (operation->fail(code, what, hint)) cancel(operation, nullptr);
}

bool Worker::end_operations(ErrorCode code, const std::string& what, const std::string& hint,
                            const Deadline& deadline) {
  const Error why(code, what, hint);
  gone_.end(why);
  shifts_.stop();
  for (const LoopOf& each : worker_loops_) each.reactor->call([&] { each.worker_loop->leave(why); });
  const auto idle = [this] {
    return std::ranges::all_of(worker_loops_, [](const LoopOf& each) {
      bool is_idle = false;
      each.reactor->call([&] { is_idle = each.worker_loop->is_idle(); });
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
  launch(operation, false);
  return operation;
}

// Nothing is sent of what has failed before; the servers are told to fail the round.
void Worker::refuse(const std::shared_ptr<Tensor>& tensor, const Operation& late, std::uint32_t round,
                    const std::string& why) {
  Request request = late.request;
  request.input = request.output = nullptr;
  request.input_allocation = request.output_allocation = {};
  const auto operation = make_operation(tensor, request, round, sequence_.fetch_add(1));
  (void)operation->fail(ErrorCode::kTimeout, why, kRaiseTimeout);
  launch(operation, false);
}

void Worker::require_direct() const {
  if (options_.hosts.active()) {
    throw Error(ErrorCode::kInvalidArgument, "the ranks of each host sum first, and no rank can add to weights alone",
                "set BPS_ASYNC=1, or BPS_HOST_SUM=0, in all processes of the job");
  }
}

// What the streams of a device's arrays have reached now.
std::unique_ptr<DeviceArrays> Worker::take_points(const Tensor& tensor, const Request& request,
                                                  const DeviceMemory& memory) {
  if (tensor.compressor && tensor.compressor->applies(request.kind, request.op)) {
    throw Error(ErrorCode::kInvalidArgument, "'" + tensor.name + "' is compressed, and its array is on a GPU",
                "pass compression=Uncompressed(), or a copy of the array in CPU memory");
  }
  auto arrays = std::make_unique<DeviceArrays>(*memory.device);
  const auto& [source, target] = memory.streams;
  if (source != 0) arrays->ready[0] = memory.device->record(source);
  if (target != 0 && target != source) arrays->ready[1] = memory.device->record(target);
  return arrays;
}

std::shared_ptr<Operation> Worker::start(const std::shared_ptr<Tensor>& whose, const Request& request,
                                         const DeviceMemory& memory) {
  const bool is_stored = request.kind >= tensor::OperationKind::kStore && !tensor::is_feedback(request.kind);
  if (is_stored) require_direct();
  const auto tensor = request.kind == tensor::OperationKind::kAccumulate ? alone(*whose) : whose;
  require_alive(*tensor, request.kind);
  std::unique_ptr<DeviceArrays> on_device;
  if (memory.device != nullptr) on_device = take_points(*tensor, request, memory);  // or an error, before it is a round
  const std::uint32_t round = next_round(*tensor, request);
  Request what = request;
  if (what.kind == tensor::OperationKind::kAccumulate) count_tries(*tensor, what, round);
  auto plans = plans_of(*tensor, what, round);
  auto operation = make_operation(tensor, what, round, sequence_.fetch_add(1), {}, std::move(plans));
  operation->on_device = std::move(on_device);
  launch(operation, request.awaited);
  return operation;
}

// An addition that is sent again names the round in which it was sent first.
void Worker::count_tries(Tensor& tensor, Request& request, std::uint32_t round) {
  if (!request.again) tensor.latest.store(round);
  const std::uint32_t tries = round - tensor.latest.load();
  if (tries > std::numeric_limits<std::uint16_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, "'" + tensor.name + "' was sent too often without success",
                "call store() again, on every rank");
  }
  request.addition.tries = static_cast<std::uint16_t>(tries);
}

std::uint32_t Worker::next_round(Tensor& tensor, const Request& request) {
  if (tensor::is_feedback(request.kind) && !tensor.compressor) {
    throw Error(ErrorCode::kInvalidArgument, "'" + tensor.name + "' is not compressed: nothing of it is fed back",
                "declare it with a compression");
  }
  const bool feeds = tensor::is_feedback(request.kind);  // of push_pull
  if (tensor.compressor && (feeds || tensor.compressor->applies(request.kind, request.op)) &&
      !tensor.compressor->bind(feeds ? tensor::OperationKind::kPushPull : request.kind)) {
    throw Error(ErrorCode::kInvalidArgument,
                "'" + tensor.name + "' is compressed, and was used with another kind of operation before",
                "use names of their own for push_pull and reduce_scatter");
  }
  const bool split = request.kind == tensor::OperationKind::kSplit;
  if (split && request.pulls) return tensor.next_pull.fetch_add(1);
  const std::uint32_t round = tensor.next_round.fetch_add(1);
  if (!split) {  // other threads may have begun later ones meanwhile
    std::uint32_t pull = tensor.next_pull.load();
    while (static_cast<std::int32_t>(round + 1 - pull) > 0 &&
           !tensor.next_pull.compare_exchange_weak(pull, round + 1)) {
    }
  }
  return round;
}

std::shared_ptr<Operation> Worker::make_operation(const std::shared_ptr<Tensor>& tensor, const Request& request,
                                                  std::uint32_t round, std::uint64_t sequence,
                                                  std::span<const Begun> only,
                                                  std::shared_ptr<const Plans> plans) const {
  Request what = request;
  what.op = exact_op(what.op, what.kind, tensor->exactness);
  const bool is_compressed = tensor->compressor && tensor->compressor->applies(what.kind, what.op);
  what.two_phase &= options_.two_phase && what.kind < tensor::OperationKind::kSplit && !is_compressed;
  if (options_.two_phase && request.two_phase && !what.two_phase) has_one_phase_.store(true);
  auto operation = std::make_shared<Operation>(tensor, what, round, sequence, worker_loops_.size(), places_.count(),
                                               only, std::move(plans));
  if (worker_loops_.size() == 1) operation->completion.progress = worker_loops_.front().reactor->progress();
  return operation;
}

void Worker::launch(const std::shared_ptr<Operation>& operation, bool awaited) {
  submit(operation);
  if (!awaited || !operation->completion.progress) {
    for (const LoopOf& worker_loop : worker_loops_) worker_loop.reactor->progress()->wake();
  }
  const Tensor& tensor = *operation->tensor;
  if (gone_.is_any() || tensor.failed.load()) {  // between the check and the submission
    try {
      check_alive(tensor, operation->request.kind);
    } catch (const Error& error) {
      abort(operation, error.code(), error.what(), error.hint());
    }
  }
}

// The worker loops share the work. The first to get it also watches its deadline, and keeps it alive.
void Worker::submit(const std::shared_ptr<Operation>& operation) {
  const std::size_t loops = worker_loops_.size();
  const std::size_t first = operation->sequence % loops;
  worker_loops_[first].worker_loop->submit(operation, true);
  for (std::size_t i = 0; i < loops; ++i) {
    if (i == first) continue;
    try {
      worker_loops_[i].worker_loop->submit(operation, false);
    } catch (const Error& error) {
      // Others work on it already. These loops cancel their parts without having admitted it; their share ends here.
      std::uint64_t unreached = 0;
      for (std::size_t left = i; left < loops; ++left) unreached += left == first ? 0 : 1;
      abort(operation, error.code(), error.what(), error.hint());
      transport::Reactor& reactor = *worker_loops_[first].reactor;
      reactor.loop().post([operation, unreached, &reactor] { finish(*operation, unreached, reactor.counters()); });
      return;
    }
  }
}

void Worker::forget_memory(std::uint64_t identity) {
  for (const LoopOf& worker_loop : worker_loops_) {
    worker_loop.reactor->loop().post(
        [worker_loop = worker_loop.worker_loop, identity] { worker_loop->forget_memory(identity); });
  }
}

}  // namespace bps::worker
