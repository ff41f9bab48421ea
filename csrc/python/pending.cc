// SPDX-License-Identifier: Apache-2.0
#include "python/pending.h"

#include <algorithm>
#include <optional>

#include "compress/codec_call.h"
#include "core/fork.h"
#include "python/hooks.h"
#include "python/interruptible.h"

namespace py = pybind11;

namespace bps::python {
namespace {

using worker::Resumption;

constexpr double kSlice_s = std::chrono::duration<double>(kWaitSlice).count();
// The core aborts every operation at its deadline, and then waits for servers to acknowledge that, or fences them.
constexpr double kGrace_s = 60.0;

// Keeps arrays whose handles were dropped too early.
class Orphans {
 public:
  static Orphans& instance() {
    static auto& orphans = *[] {
      auto* made = new Orphans;  // is never destroyed: Python objects may not be, so late
      hold_across_fork(made->mutex_);
      return made;
    }();
    return orphans;
  }
  void adopt(PendingArrays arrays) {
    const std::lock_guard lock(mutex_);
    all_.push_back(std::move(arrays));
    any_.store(true, std::memory_order_relaxed);
  }
  std::vector<std::shared_ptr<worker::Operation>> operations() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<worker::Operation>> found;
    for (const PendingArrays& arrays : all_) found.push_back(arrays.operation);
    return found;
  }
  void release(bool all) {
    if (!any_.load(std::memory_order_relaxed)) return;
    std::vector<PendingArrays> over;  // are destroyed after the lock is gone: an array's end may run any code
    const std::lock_guard lock(mutex_);
    const auto keep = [&](const PendingArrays& arrays) {
      return is_copied(*arrays.operation) || (!all && !is_over(*arrays.operation));
    };
    const auto first = std::stable_partition(all_.begin(), all_.end(), keep);
    std::move(first, all_.end(), std::back_inserter(over));
    all_.erase(first, all_.end());
    any_.store(!all_.empty(), std::memory_order_relaxed);
  }

 private:
  std::mutex mutex_;
  std::vector<PendingArrays> all_;
  std::atomic<bool> any_{false};
};

// Returns when an operation began. One without a deadline cannot tell its age; it began a slice ago at least.
Clock::time_point begin_of(const worker::Operation& operation) {
  const auto now = Clock::now();
  return now - operation.age(now).value_or(kWaitSlice);
}

// Most operations end within the first slice, without a look at the clock.
bool wait_interruptibly(const worker::Operation& operation, double timeout_s) {
  if (!operation.is_done()) compress::CodecCall::refuse_within();
  std::optional<Deadline> deadline;
  for (;;) {
    {
      const WithoutGil released;
      const double left = deadline ? deadline->left_ms() / 1e3 : timeout_s;
      if (operation.wait_briefly(static_cast<int>(std::clamp(left, 0.0, kSlice_s) * 1e3))) return true;
    }
    if (!deadline) deadline = Deadline::after(timeout_s - std::min(timeout_s, kSlice_s));
    check_signals();
    compress::CodecCall::check_behind(begin_of(operation));
    if (deadline->passed()) return operation.is_done();
  }
}

}  // namespace

void wait_for(worker::Operation& operation, bool abandons) {
  bool over = false;
  try {
    over = wait_interruptibly(operation, operation.request.timeout_s + kGrace_s);
  } catch (const Error&) {  // a loop can end the operation only once this thread waits no longer
    if (abandons) operation.completion.give_up();
    throw;
  } catch (...) {
    if (abandons) abandon(operation);
    throw;
  }
  if (!over) throw Error(ErrorCode::kTimeout, operation.describe() + " is stuck", "report this as a bug");
}

void abandon(worker::Operation& operation) {
  const WithoutGil released;
  worker::Operation* last = &operation;
  for (std::shared_ptr<worker::Operation> next; last != nullptr; last = next.get()) {
    last->completion.give_up();
    if (!last->wait(Deadline::after(kGrace_s)) || !last->is_suspended()) return;
    last->suspension().withdraw();  // another thread may be about to go on with it
    next = last->suspension().continued_by();
  }
}

void settle(worker::Operation& operation, bool abandons) {
  wait_for(operation, abandons);
  if (!operation.is_suspended()) return;
  try {
    if (operation.suspension().resumption() == Resumption::kNone) hooks().resume();
  } catch (...) {
    if (abandons) abandon(operation);
    throw;
  }
  if (const auto next = operation.suspension().continued_by()) settle(*next, abandons);
}

void rethrow(const worker::Operation& operation) {
  if (!operation.is_suspended()) return operation.rethrow();
  const worker::Suspension& suspension = operation.suspension();
  if (const auto next = suspension.continued_by()) return rethrow(*next);
  if (suspension.resumption() != Resumption::kComplete) operation.rethrow();
}

bool is_copied(const worker::Operation& operation) {
  if (operation.is_copied()) return true;
  const auto next = operation.is_suspended() ? operation.suspension().continued_by() : nullptr;
  return next && is_copied(*next);
}

bool is_over(const worker::Operation& operation) {
  if (!operation.is_done() || operation.is_copied()) return false;
  if (!operation.is_suspended()) return true;
  const worker::Suspension& suspension = operation.suspension();
  const auto next = suspension.continued_by();
  return next ? is_over(*next) : suspension.resumption() != Resumption::kNone || suspension.is_withdrawn();
}

void keep_until_over(PendingArrays arrays) {
  Orphans::instance().adopt(std::move(arrays));
}

void finish_kept(double timeout_s) {
  const Deadline deadline = Deadline::after(timeout_s);
  for (const auto& operation : Orphans::instance().operations()) {
    if (!wait_interruptibly(*operation, deadline.left_ms() / 1e3)) return;
  }
}

void release_kept(bool all) {
  Orphans::instance().release(all);
}

}  // namespace bps::python
