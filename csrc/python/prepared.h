// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/fork.h"
#include "python/memory.h"
#include "worker/prepared_operation.h"

namespace bps::node {
class Process;
}

namespace bps::python {

// Holds a prepared operation for Python, with its process and its arrays. A call starts it and waits, without anything
// of Python in between; start() and wait() do the same in two steps. The GIL is held, and released while C++ may wait:
// `state_` keeps other threads away meanwhile.
class Prepared {
 public:
  struct Description {
    pybind11::object process;
    std::shared_ptr<worker::Tensor> tensor;
    worker::Request request;
    Memory source;
    Memory target;
    pybind11::object result;
    std::byte* copy_to = nullptr;      // where the source is copied before each start; null: nowhere
    device::Device* device = nullptr;  // the device whose memory the source and the target are; null: the host's
  };

  explicit Prepared(Description description);
  ~Prepared();  // the arrays stay until the operation is over
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  pybind11::object call();
  void start();
  pybind11::object wait();
  bool done() const;
  bool taken() const { return state_ == State::kIdle; }
  int completion_fd();
  // Keeps the arrays of an operation that does not keep them, until it is over.
  void keep(pybind11::object source, pybind11::object target) const;
  std::string describe() const;

 private:
  enum class State : std::uint8_t {
    kIdle,
    kInCall,   // a thread is in C++ with it, without the GIL
    kStarted,  // started by start(), and not waited for yet
  };

  void begin();
  void check_memory() const;
  void find_streams();
  void drop_current();
  void launch(bool awaited);
  bool follow(const Error& error);
  // Is called with the GIL, and waits for a moment if it is awaited. Returns true when it is done by then.
  bool launch_or_follow(bool awaited);
  pybind11::object finish();
  void check_started() const;

  Description description_;
  node::Process* process_;
  worker::PreparedOperation prepared_;
  pybind11::object source_place_;  // what place_of() returned; null: it cannot move
  pybind11::object target_place_;
  const std::uint32_t forks_ = fork_count();
  State state_ = State::kIdle;
};

}  // namespace bps::python
