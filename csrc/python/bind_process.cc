// A process of the job, its operations and its tensors. The GIL is released wherever C++ may wait.
#include <pybind11/stl.h>

#include "node/process.h"
#include "python/bind.h"
#include "python/handle.h"
#include "python/memory.h"
#include "server/reduce.h"
#include "van/van.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace bps {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

void bind_declared(py::module_& module) {
  py::class_<Tensor, std::shared_ptr<Tensor>>(module, "Tensor", "A declared name.")
      .def_readonly("name", &Tensor::name)
      .def_readonly("id", &Tensor::id)
      .def_readonly("bytes", &Tensor::bytes)
      .def_readonly("member", &Tensor::member)
      .def(
          "fits",
          [](const Tensor& t, const Memory& memory, std::uint64_t elements) {
            return t.dtype == memory.dtype && t.bytes == elements * size_of(memory.dtype);
          },
          py::arg("memory"), py::arg("elements"), "Whether `elements` of the dtype of `memory` are what was declared.")
      .def_property_readonly("partitions", [](const Tensor& t) { return t.whole.count(); })
      .def_property_readonly("group_size", [](const Tensor& t) { return t.group->size(); })
      .def_property_readonly(
          "server_bytes",
          [](const Tensor& t) {
            std::vector<std::uint64_t> bytes(t.whole_plan.size(), 0);
            for (std::size_t place = 0; place < t.whole_plan.size(); ++place) {
              for (const std::uint32_t i : t.whole_plan[place]) bytes[place] += t.whole.piece(i).length;
            }
            return bytes;
          },
          "Bytes of push_pull by [loop of this worker x loop of a server].");
}

}  // namespace

void bind_process(py::module_& module) {
  bind_declared(module);

  py::class_<Startup>(module, "Startup", "Who this process is in the job.")
      .def(py::init<>())
      .def_readwrite("worker_rank", &Startup::worker_rank)
      .def_readwrite("server_rank", &Startup::server_rank)
      .def_readwrite("workers", &Startup::workers)
      .def_readwrite("servers", &Startup::servers)
      .def_readwrite("hosts_scheduler", &Startup::hosts_scheduler)
      .def_readwrite("joint", &Startup::joint)
      .def_readwrite("scheduler_host", &Startup::scheduler_host)
      .def_readwrite("scheduler_ports", &Startup::scheduler_ports)
      .def_readwrite("processes_on_host", &Startup::processes_on_host)
      .def_readwrite("job", &Startup::job)
      .def_readwrite("secret", &Startup::secret);

  py::class_<Process>(module, "Process", "This process as a member of a job.")
      .def_static("start", &Process::start, py::arg("config"), py::arg("startup"), ReleaseGil())
      .def("shutdown", &Process::shutdown, py::arg("timeout_s"), ReleaseGil())
      .def("wait_for_end", &Process::wait_for_end, ReleaseGil())
      .def("metrics", &Process::metrics, ReleaseGil())
      .def_property_readonly("routes", &Process::routes)
      .def_property_readonly("timeout_s", &Process::operation_timeout_s)
      .def_property_readonly("workers", [](const Process& p) { return p.membership().workers; })
      .def_property_readonly("servers", [](const Process& p) { return p.membership().servers; })
      .def_property_readonly("rank", [](Process& p) { return p.worker().rank(); })
      .def("describe",
           [](const Process& p) {
             std::vector<std::string> nodes;
             for (const Node& node : p.membership().nodes) nodes.push_back(node.describe());
             return nodes;
           })
      .def(
          "barrier",
          [](Process& p, std::uint32_t group, double timeout_s) {
            p.van().barrier(*p.worker().group(group), timeout_s);
          },
          py::arg("group"), py::arg("timeout_s"), ReleaseGil())
      .def(
          "new_group",
          [](Process& p, std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s) {
            return p.worker().new_group(std::move(ranks), name, timeout_s).id;
          },
          py::arg("ranks"), py::arg("name"), py::arg("timeout_s"), ReleaseGil())
      .def(
          "declare",
          [](Process& p,
             const std::vector<std::tuple<std::uint32_t, std::string, Dtype, std::uint64_t, std::string>>& specs) {
            std::vector<TensorSpec> tensors;
            for (const auto& [group, name, dtype, count, shape] : specs) {
              tensors.push_back({group, name, static_cast<std::uint8_t>(dtype), count, shape});
            }
            return p.worker().declare(tensors);
          },
          py::arg("tensors"), ReleaseGil(), "tensors: (group, name, dtype, count, shape) each.")
      .def(
          "start_operation",
          [](Process& p, const std::shared_ptr<Tensor>& tensor, Kind kind, ReduceOp op, const Memory& source,
             const Memory& target, py::object result, bool pushes, bool pulls, std::uint32_t root,
             std::int32_t priority, bool awaited, std::optional<double> timeout_s) {
            Request request;
            request.kind = kind;
            request.op = op;
            request.pushes = pushes;
            request.pulls = pulls;
            request.root = root;
            request.input = source.address;
            request.output = target.address;
            request.input_allocation = source.block;
            request.output_allocation = target.block;
            request.priority = priority;
            request.timeout_s = timeout_s.value_or(p.operation_timeout_s());
            request.awaited = awaited;
            const auto start = [&] {
              const py::gil_scoped_release released;
              return p.worker().start(tensor, request);
            };
            return std::make_unique<Handle>(start(), std::move(result), source.keep, target.keep);
          },
          py::arg("tensor"), py::arg("kind"), py::arg("op"), py::arg("source"), py::arg("target"), py::arg("result"),
          py::arg("pushes"), py::arg("pulls"), py::arg("root"), py::arg("priority"), py::arg("awaited"),
          py::arg("timeout_s") = py::none(), "awaited: the caller waits next. timeout_s: None is the job's.")
      .def(
          "forget_memory", [](Process& p, std::uint64_t identity) { p.worker().forget_memory(identity); },
          py::arg("identity"), ReleaseGil());

  module.def("reduce_isa", [] { return std::string(reduce_isa()); }, "Instruction set of the reducer on this machine.");
}

}  // namespace bps
