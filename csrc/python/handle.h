// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "core/fork.h"
#include "python/pending.h"

namespace bps::python {

// Holds one asynchronous operation for Python. It gives its result once. The GIL is held, which wait() releases.
class Handle {
 public:
  Handle(std::shared_ptr<worker::Operation> operation, pybind11::object result, pybind11::object source,
         pybind11::object target);
  // Nobody can wait for a synchronous call again, which is given up. Of others the arrays stay until they are over.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool done() const { return pending_.operation->is_done() || forks_ != fork_count(); }
  bool taken() const { return taken_; }
  pybind11::object wait();
  // Ends the operation, with an error unless it is complete. Nothing of it touches the caller's memory afterwards.
  void give_up();
  int completion_fd() { return pending_.operation->completion.descriptor(); }
  std::string describe() const;

 private:
  void check_not_taken() const;

  PendingArrays pending_;
  pybind11::object result_;
  const std::uint32_t forks_ = fork_count();
  bool taken_ = false;
};

}  // namespace bps::python
