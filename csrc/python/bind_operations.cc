// SPDX-License-Identifier: Apache-2.0
// Binds operations as Python asks for them: started once, or prepared, which is described once and started many times.
// The GIL is released wherever C++ may wait.
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "node/process.h"
#include "python/bind.h"
#include "python/handle.h"
#include "python/hooks.h"
#include "python/interruptible.h"
#include "python/prepared.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace bps::python {
namespace {

using node::Process;

worker::Request make_request(tensor::OperationKind kind, ReduceOp op, const Memory& source, const Memory& target,
                             std::uint32_t root, std::int32_t priority) {
  worker::Request request;
  request.kind = kind;
  request.op = op;
  if (kind == tensor::OperationKind::kAccumulate) {
    request.addition.most_ahead = static_cast<std::uint16_t>(root);
  } else {
    request.root = root;
  }
  request.input = source.address;
  request.output = target.address;
  request.input_allocation = source.block;
  request.output_allocation = target.block;
  request.priority = priority;
  return request;
}

worker::DeviceMemory device_memory_of(const Memory& source, const Memory& target) {
  if (source.device != target.device && source.nbytes > 0 && target.nbytes > 0) {
    throw Error(ErrorCode::kInvalidArgument, "the array and `out` are not in the memory of the same device",
                "pass arrays of one GPU, or both in CPU memory");
  }
  return {source.device != nullptr ? source.device : target.device, {source.stream, target.stream}};
}

double timeout_of(const Process& process, std::optional<double> timeout_s) {
  return timeout_s ? checked_timeout(*timeout_s) : process.operation_timeout_s();
}

std::unique_ptr<Handle> start_operation(Process& process, const std::shared_ptr<worker::Tensor>& tensor,
                                        tensor::OperationKind kind, ReduceOp op, const Memory& source,
                                        const Memory& target, py::object result, bool pushes, bool pulls,
                                        std::uint32_t root, std::int32_t priority, bool awaited,
                                        std::optional<double> timeout_s, bool survives, bool again) {
  worker::Request request = make_request(kind, op, source, target, root, priority);
  request.pushes = pushes;
  request.pulls = pulls;
  request.awaited = awaited;
  request.survives_servers = survives;
  request.again = again;
  const worker::DeviceMemory memory = device_memory_of(source, target);
  const auto start = [&] {
    const WithoutGil released;
    const Process::Call call(process);
    request.timeout_s = timeout_of(process, timeout_s);
    return process.worker().start(tensor, request, memory);
  };
  return std::make_unique<Handle>(start(), std::move(result), source.keep, target.keep);
}

std::unique_ptr<Prepared> prepare_operation(py::object process, const std::shared_ptr<worker::Tensor>& tensor,
                                            tensor::OperationKind kind, ReduceOp op, const Memory& source,
                                            const Memory& target, py::object result, std::uint32_t root,
                                            std::int32_t priority, std::optional<double> timeout_s,
                                            std::uintptr_t copy_to) {
  worker::Request request = make_request(kind, op, source, target, root, priority);
  device::Device* const device = device_memory_of(source, target).device;
  if (copy_to != 0) {
    request.input = reinterpret_cast<std::byte*>(copy_to);
    request.input_allocation = target.block;
  }
  request.survives_servers = true;
  auto& member = process.cast<Process&>();
  const Process::Call call(member);
  request.timeout_s = timeout_of(member, timeout_s);
  return std::make_unique<Prepared>(Prepared::Description{std::move(process), tensor, request, source, target,
                                                          std::move(result), reinterpret_cast<std::byte*>(copy_to),
                                                          device});
}

}  // namespace

void bind_operations(py::module_& module) {
  py::class_<Prepared>(
      module, "PreparedOperation",
      "An operation that is described once, by `prepare()`, and started many times. `operation()` runs it; `start()` "
      "and then `wait()` or `await operation` do so in two steps. Every rank starts it as often and in the same "
      "order. The arrays belong to it from each start until it has been waited for.")
      .def("__call__", &Prepared::call,
           "Runs the operation, without holding the GIL, and returns its array.\n\n"
           "Raises:\n"
           "    InvalidArgumentError: it is in progress, or the memory was freed or given to forget(); nothing has "
           "been sent.\n"
           "    NotInitializedError: the job in which it was prepared is over.\n"
           "    PeerLostError, DeadlineError, MismatchError, ...: what became of it.")
      .def(
          "start",
          [](const py::object& self) {
            self.cast<Prepared&>().start();
            return self;
          },
          py::return_value_policy::reference,
          "Starts the operation and returns it; wait() must follow. Raises what a call raises before anything is sent.")
      .def("wait", &Prepared::wait,
           "Blocks until the operation that start() has started is over, without holding the GIL, and returns its "
           "array.\n\n"
           "Raises:\n"
           "    UnknownHandleError: it has not been started, or was waited for.\n"
           "    PeerLostError, DeadlineError, MismatchError, ...: what became of it.")
      .def("done", &Prepared::done, "Whether nothing of it is in progress.")
      .def("__await__", [](const py::object& self) { return hooks().awaiting(self); })
      .def("completion_fd", &Prepared::completion_fd, "Readable once the operation is over.")
      .def(
          "keep", [](const Prepared& self, const py::object& array) { self.keep(array, array); }, py::arg("array"),
          "Keeps an array until nothing of the last start writes to it any more, in this view or the next.")
      .def_property_readonly("taken", &Prepared::taken, "Whether there is nothing to wait for.")
      .def("__repr__", [](const Prepared& self) { return "<PreparedOperation: " + self.describe() + ">"; });

  module.def(
      "start_operation", &start_operation, py::arg("process"), py::arg("tensor"), py::arg("kind"), py::arg("op"),
      py::arg("source"), py::arg("target"), py::arg("result"), py::arg("pushes"), py::arg("pulls"), py::arg("root"),
      py::arg("priority"), py::arg("awaited"), py::arg("timeout_s") = py::none(), py::arg("survives") = true,
      py::arg("again") = false,
      "awaited: the caller waits next. timeout_s: None is the job's. survives: with BPS_SERVER_FAILOVER the loss "
      "of a server does not abort it. root: of an accumulate, by how many rounds it may be ahead.");
  module.def("prepare_operation", &prepare_operation, py::arg("process"), py::arg("tensor"), py::arg("kind"),
             py::arg("op"), py::arg("source"), py::arg("target"), py::arg("result"), py::arg("root"),
             py::arg("priority"), py::arg("timeout_s"), py::arg("copy_to"),
             "As start_operation, for an operation that is started later. copy_to: where in the target "
             "the source is copied before each start, to be sent from there; or 0.");
}

}  // namespace bps::python
