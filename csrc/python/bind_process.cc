// A process of the job, its operations and its tensors. The GIL is released wherever C++ may wait.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "node/process.h"
#include "python/bind.h"
#include "server/reduce.h"
#include "van/van.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace bps {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

using Block = std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t>;  // address, bytes, identity

std::byte* pointer(std::uintptr_t address) {
  return reinterpret_cast<std::byte*>(address);
}
Allocation allocation(const Block& block) {
  const auto& [address, size, identity] = block;
  return {{pointer(address), size}, identity};
}

// Waits in slices, so that Ctrl-C is seen. Most operations end within the first, without a look at the clock.
bool wait_interruptibly(const Operation& operation, double timeout_s) {
  constexpr double kSlice_s = 0.2;
  std::optional<Deadline> deadline;
  for (;;) {
    {
      const py::gil_scoped_release released;
      const double left = deadline ? deadline->left_ms() / 1e3 : timeout_s;
      if (operation.wait_briefly(static_cast<int>(std::clamp(left, 0.0, kSlice_s) * 1e3))) return true;
    }
    if (!deadline) deadline = Deadline::after(timeout_s - std::min(timeout_s, kSlice_s));
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (deadline->passed()) return operation.done();
  }
}

void bind_operation(py::module_& module) {
  py::class_<Tensor, std::shared_ptr<Tensor>>(module, "Tensor", "A declared name.")
      .def_readonly("name", &Tensor::name)
      .def_readonly("id", &Tensor::id)
      .def_readonly("bytes", &Tensor::bytes)
      .def_readonly("member", &Tensor::member)
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
  py::class_<Operation, std::shared_ptr<Operation>>(module, "Operation", "One call in progress.")
      .def("done", &Operation::done)
      .def("finished", &Operation::finished)
      .def("wait", &wait_interruptibly, py::arg("timeout_s"))
      .def("rethrow", &Operation::rethrow)
      .def("completion_fd", &Operation::completion_fd)
      .def_property_readonly("timeout_s", [](const Operation& o) { return o.request.timeout_s; })
      .def("__repr__", [](const Operation& o) { return "<" + o.describe() + ">"; });
}

}  // namespace

void bind_process(py::module_& module) {
  py::enum_<Dtype>(module, "Dtype")
      .value("float32", Dtype::kFloat32)
      .value("float64", Dtype::kFloat64)
      .value("float16", Dtype::kFloat16)
      .value("bfloat16", Dtype::kBfloat16)
      .value("uint8", Dtype::kUint8)
      .value("int8", Dtype::kInt8)
      .value("int32", Dtype::kInt32)
      .value("int64", Dtype::kInt64)
      .value("bool", Dtype::kBool);
  py::enum_<ReduceOp>(module, "ReduceOp")
      .value("sum", ReduceOp::kSum)
      .value("average", ReduceOp::kAverage)
      .value("min", ReduceOp::kMin)
      .value("max", ReduceOp::kMax)
      .value("product", ReduceOp::kProduct);
  py::enum_<Kind>(module, "Kind")
      .value("push_pull", Kind::kPushPull)
      .value("reduce_scatter", Kind::kReduceScatter)
      .value("all_gather", Kind::kAllGather)
      .value("broadcast", Kind::kBroadcast)
      .value("split", Kind::kSplit);

  bind_operation(module);

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
          [](Process& p, const std::shared_ptr<Tensor>& tensor, Kind kind, ReduceOp op, bool pushes, bool pulls,
             std::uint32_t root, std::uintptr_t input, std::uintptr_t output, const Block& input_block,
             const Block& output_block, std::int32_t priority, double timeout_s) {
            Request request;
            request.kind = kind;
            request.op = op;
            request.pushes = pushes;
            request.pulls = pulls;
            request.root = root;
            request.input = pointer(input);
            request.output = pointer(output);
            request.input_allocation = allocation(input_block);
            request.output_allocation = allocation(output_block);
            request.priority = priority;
            request.timeout_s = timeout_s;
            return p.worker().start(tensor, request);
          },
          py::arg("tensor"), py::arg("kind"), py::arg("op"), py::arg("pushes"), py::arg("pulls"), py::arg("root"),
          py::arg("input"), py::arg("output"), py::arg("input_block"), py::arg("output_block"), py::arg("priority"),
          py::arg("timeout_s"), ReleaseGil(), "Blocks: (address, bytes, identity) of the allocation around an array.")
      .def(
          "forget_memory", [](Process& p, std::uint64_t identity) { p.worker().forget_memory(identity); },
          py::arg("identity"), ReleaseGil());

  module.def("reduce_isa", [] { return std::string(reduce_isa()); }, "Instruction set of the reducer on this machine.");
}

}  // namespace bps
