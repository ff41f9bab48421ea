// SPDX-License-Identifier: Apache-2.0
#include "python/prepared.h"

#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "core/interrupt.h"
#include "node/process.h"
#include "python/blocks.h"
#include "python/errors.h"
#include "python/hooks.h"
#include "python/interruptible.h"
#include "python/pending.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace bps::python {
namespace {

constexpr int kSlice_ms = static_cast<int>(std::chrono::milliseconds(kWaitSlice).count());

// Returns a method that gives the address of the array, if its memory can move: that of torch's tensors can.
py::object place_of(const Memory& memory) {
  return memory.keep ? py::getattr(memory.keep, "data_ptr", py::object()) : py::object();
}

}  // namespace

Prepared::Prepared(Description description)
    : description_(std::move(description)),
      process_(&description_.process.cast<node::Process&>()),
      prepared_{description_.tensor, description_.request, nullptr, {description_.device}},
      source_place_(place_of(description_.source)),
      target_place_(place_of(description_.target)) {}

Prepared::~Prepared() {
  drop_current();
}

// The caller holds the GIL.
void Prepared::begin() {
  if (state_ != State::kIdle) {
    throw Error(ErrorCode::kInvalidArgument, describe() + " has been started already",
                "wait for a prepared operation before you start it again");
  }
  if (description_.device == nullptr) {
    check_memory();
  } else if (forks_ != fork_count()) {  // else the driver's error would come first
    throw Error(ErrorCode::kNotInitialized, "this process was forked after " + describe() + " had been prepared",
                "start operations in the process that prepared them");
  }
  state_ = State::kInCall;
  if (prepared_.current && prepared_.current->is_done() && !is_over(*prepared_.current)) drop_current();
  if (description_.device == nullptr) return;
  try {
    find_streams();  // this runs code of Python: other threads may come by
  } catch (...) {
    state_ = State::kIdle;
    throw;
  }
}

// Throws when the memory was freed or has moved: a NIC may still have the pages of an identity that is gone.
void Prepared::check_memory() const {
  if (!BlockTable::instance().knows(description_.source.block.identity) ||
      !BlockTable::instance().knows(description_.target.block.identity)) {
    throw Error(ErrorCode::kInvalidArgument, "the memory of " + describe() + " was freed, or given to forget()",
                "prepare the operation again");
  }
  const auto moved = [](const py::object& place, const Memory& memory) {
    return place && place().cast<std::uintptr_t>() != reinterpret_cast<std::uintptr_t>(memory.address);
  };
  if (moved(source_place_, description_.source) || moved(target_place_, description_.target)) {
    throw Error(ErrorCode::kInvalidArgument, "a tensor of " + describe() + " has other memory now",
                "prepare the operation again after resize_() or an assignment to .data");
  }
}

// Asks for the streams again, as each start may be in another stream than the last one.
void Prepared::find_streams() {
  const auto stream_of = [](const Memory& memory) {
    return memory.device == nullptr ? 0 : hooks().stream_of(memory.keep).cast<std::uintptr_t>();
  };
  prepared_.memory.streams = {stream_of(description_.source), stream_of(description_.target)};
}

// Drops the operation, as the next start makes another one. Its arrays are kept: a device may still read them, and the
// next view write to them.
void Prepared::drop_current() {
  keep(description_.source.keep, description_.target.keep);
  prepared_.current = nullptr;
}

void Prepared::keep(py::object source, py::object target) const {
  const auto& operation = prepared_.current;
  if (operation && !is_over(*operation)) keep_until_over({operation, std::move(source), std::move(target)});
}

// The caller does not hold the GIL.
void Prepared::launch(bool awaited) {
  std::optional<node::Process::Call> call;
  try {
    call.emplace(*process_);
  } catch (const Error& error) {
    throw Error(ErrorCode::kNotInitialized, error.what(),
                "a prepared operation ends with its job, or its view: prepare it again");
  }
  if (description_.copy_to != nullptr) {
    std::memmove(description_.copy_to, description_.source.address, description_.source.nbytes);
  }
  process_->worker().start(prepared_, awaited);
}

// Goes on in the next view after the loss of a server. Returns false where it cannot. The caller holds the GIL.
bool Prepared::follow(const Error& error) {
  if (error.code() != ErrorCode::kRoundAborted && error.code() != ErrorCode::kNotInitialized) return false;
  py::object next = hooks().rebound(description_.process, prepared_.tensor);
  if (next.is_none()) return false;
  const auto [process, tensor] = next.cast<std::pair<py::object, std::shared_ptr<worker::Tensor>>>();
  description_.process = process;
  process_ = &process.cast<node::Process&>();
  prepared_.tensor = tensor;
  drop_current();
  return true;
}

bool Prepared::launch_or_follow(bool awaited) {
  for (bool launched = false;;) {
    try {
      const WithoutGil released;
      launch(awaited);
      launched = true;
      return awaited && prepared_.current->wait_briefly(kSlice_ms);
    } catch (const Error& error) {
      if (launched || !follow(error)) throw;
    }
  }
}

py::object Prepared::finish() {
  rethrow(*prepared_.current);
  state_ = State::kIdle;
  return description_.result;
}

py::object Prepared::call() {
  begin();
  try {
    if (!launch_or_follow(true) || prepared_.current->is_suspended()) settle(*prepared_.current, true);
    return finish();
  } catch (...) {
    state_ = State::kIdle;
    throw;
  }
}

void Prepared::start() {
  begin();
  try {
    (void)launch_or_follow(false);
  } catch (...) {
    state_ = State::kIdle;
    throw;
  }
  state_ = State::kStarted;
}

void Prepared::check_started() const {
  if (state_ == State::kStarted) return;
  throw Error(ErrorCode::kUnknownHandle, describe() + " has not been started", "call start() before wait()");
}

py::object Prepared::wait() {
  check_started();
  if (forks_ != fork_count()) {
    throw Error(ErrorCode::kNotInitialized,
                "this process was forked while " + describe() + " was in progress in its parent",
                "wait for operations in the process that started them");
  }
  const auto operation = prepared_.current;
  settle(*operation, false);
  check_started();          // another thread may have waited for it meanwhile
  state_ = State::kInCall;  // what makes the error may be code of Python: other threads may come by
  try {
    return finish();
  } catch (const Error& error) {
    // What a signal handler raised is no result: the error comes at the next wait.
    state_ = set_python_error(error) ? State::kIdle : State::kStarted;
    throw py::error_already_set();
  }
}

bool Prepared::done() const {
  if (state_ == State::kInCall) return false;
  return !prepared_.current || prepared_.current->is_done() || forks_ != fork_count();
}

int Prepared::completion_fd() {
  check_started();
  return prepared_.current->completion.descriptor();
}

std::string Prepared::describe() const {
  return std::string("the prepared ") + worker::name_of(description_.request.kind) + " of '" +
         description_.tensor->name + "'";
}

}  // namespace bps::python
