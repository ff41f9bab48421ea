// SPDX-License-Identifier: Apache-2.0
#include "worker/prepared_operation.h"

#include <utility>

#include "worker/worker.h"

namespace bps::worker {

// Only an operation of a single loop is used again: nothing of an earlier round can be under way to a loop then but
// what that loop takes in order.
void Worker::start(PreparedOperation& prepared, bool awaited) {
  std::shared_ptr<Operation>& operation = prepared.current;
  if (operation && !operation->done()) {
    throw Error(ErrorCode::kInvalidArgument, operation->describe() + " is still in progress",
                "wait for a prepared operation before you start it again");
  }
  require_alive(*prepared.tensor, prepared.request.kind);
  const std::uint32_t round = next_round(*prepared.tensor, prepared.request);
  auto plans = plans_of(*prepared.tensor, prepared.request, round);
  const std::uint64_t sequence = sequence_.fetch_add(1);
  const bool reusable =
      operation && operation->completion.progress && operation->plans == plans && operation->rearm(round, sequence);
  if (!reusable) {
    operation = make_operation(prepared.tensor, prepared.request, round, sequence, {}, std::move(plans));
  }
  try {
    launch(operation, awaited);
  } catch (const Error&) {
    // The loop that watches the operation since an earlier round will never be given this one, and must not wait for it
    // when the job ends.
    transport::Reactor& reactor = *worker_loops_.front().reactor;
    reactor.loop().post([lost = std::exchange(operation, nullptr), &reactor] { finish(*lost, 1, reactor.counters()); });
    throw;
  }
}

}  // namespace bps::worker
