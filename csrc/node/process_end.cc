// SPDX-License-Identifier: Apache-2.0
// Lets a process leave its view, or the job. What is under way ends first.
#include <algorithm>
#include <exception>
#include <utility>

#include "core/interrupt.h"
#include "core/log.h"
#include "node/process.h"
#include "node/view.h"
#include "van/scheduler.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

constexpr double kFenceGrace_s = 4;  // lets a lost server acknowledge or be ended
constexpr double kAbortPatience_s = 1;
constexpr double kQuietLook_s = 0.002;
constexpr double kQuietPatience_s = 1;  // servers may have work of others without end
constexpr double kCallPatience_s = 10;  // lets calls of other threads end: all that wait have been woken

}  // namespace

// Aborts what is still under way, and waits until the servers acknowledge that, or are fenced. Nobody may write to this
// process's memory once shutdown() has returned.
void Process::end_operations() {
  worker::Worker* const worker = current_.worker();
  if (worker == nullptr) return;
  const Deadline deadline = Deadline::after(options_.settings.deadlines.heartbeat + kFenceGrace_s);
  (void)worker->end_operations(ErrorCode::kNotInitialized, "bps_rdma was shut down before it was complete",
                               "wait for your handles before shutdown()", deadline);
}

void Process::abort(const std::string& exception) {
  const Call call(*this);
  state_.enter(ProcessState::kAborted);
  try {
    van_->abort(exception);
  } catch (const Error& error) {
    log_info(std::string("ends without the scheduler: ") + error.what());
  }
}

// Returns how the last operation failed, or ""; nothing when this process has left already.
std::optional<std::string> Process::begin_leaving() {
  if (!calls_.close(CallGate::After::kNothing)) return std::nullopt;
  end_operations();
  if (current_.get() != nullptr) current_.get()->begin_leaving();
  return current_.worker() == nullptr ? "" : current_.worker()->last_failure();
}

bool Process::shutdown(double timeout_s, bool suspends) {
  const auto failure = begin_leaving();
  if (!failure) return false;
  return leave([&] {
    // The others need not end with us after an abort; the scheduler that we host gets the time to tell them.
    const bool is_aborted = state_.is(ProcessState::kAborted);
    return van_->leave(is_aborted ? std::min(timeout_s, scheduler_ ? kAbortPatience_s : 0.0) : timeout_s, *failure,
                       suspends);
  });
}

bool Process::depart(double timeout_s) {
  const auto failure = begin_leaving();
  if (!failure) return false;
  try {
    van_->announce_leaving(timeout_s, *failure);
    // A program may end at once now, without Python's help. The others get the results that are due to them first.
    const Deadline deadline = Deadline::after(std::min(timeout_s, kQuietPatience_s));
    while (!current_.get()->loops().are_servers_quiet(deadline) && !deadline.passed() &&
           van_->end().so_far() == van::SessionEnd::How::kNotYet) {
      sleep_until(Deadline::after(kQuietLook_s));
    }
  } catch (const Error& error) {
    log_info(std::string("left without the scheduler: ") + error.what());
  }
  return true;
}

void Process::stay() {
  (void)leave([&] { return van_->wait_for_end(); });
}

void Process::end_stay() {
  current_.give_up();
}

bool Process::leave(const std::function<bool()>& say_goodbye) {
  bool well = false;
  std::exception_ptr interrupt;
  try {
    well = say_goodbye();
  } catch (const Error& error) {  // the scheduler is lost: nobody is left to be told
    log_info(std::string("left without the scheduler: ") + error.what());
  } catch (...) {
    interrupt = std::current_exception();
  }
  van_->give_up();
  calls_.run_when_empty([this] { take_down(); }, Deadline::after(kCallPatience_s));
  if (is_down() && ended_trace_)
    ended_trace_->finish();  // comes here, and not in the destructor: it can be interrupted again
  if (interrupt) std::rethrow_exception(interrupt);
  return well;
}

// Ends the view here. The van goes on: to the scheduler this process is still there.
void Process::retire() {
  if (!calls_.close(CallGate::After::kNextView)) {
    throw Error(ErrorCode::kNotInitialized, "this process has left the job", "call init() again");
  }
  // Another member may have told us before the scheduler did.
  if (worker::Worker* const worker = current_.worker()) {
    const worker::ViewEnd& end = worker->news().view_end();
    worker->news().end_view(end.is_known() ? end.error() : van::view_ended_error(van_->end().why()));
  }
  end_operations();
  calls_.run_when_empty(
      [this] {
        if (worker::Worker* const worker = current_.worker()) {
          incomplete_ = worker->take_incomplete();
          can_go_on_ = worker->can_go_on();
        }
        take_down_loops();
      },
      Deadline::after(kCallPatience_s));
  // An operation whose answers all came is complete although it was failing. One that is not over has a GPU that hangs.
  std::erase_if(incomplete_, [](const auto& operation) {
    return !operation->is_done() || !(operation->is_suspended() || operation->completion.is_incomplete());
  });
  if (current_.get() != nullptr) {
    throw Error(ErrorCode::kInternal, "calls of other threads do not end, although the view has ended",
                "end the threads that use bps_rdma");
  }
}

void Process::take_down_loops() {
  inspection_.end();
  metrics_server_.reset();
  current_.end();
  if (!trace_) return;
  trace_->stop();
  ended_trace_ = std::move(trace_);
}

void Process::take_down() {
  take_down_loops();
  current_.set_van(nullptr);
  van_.reset();
  scheduler_.reset();
  state_.enter(ProcessState::kDown);
}

}  // namespace bps::node
