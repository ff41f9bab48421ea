// SPDX-License-Identifier: Apache-2.0
// Binds a process of the job. The GIL is released wherever C++ may wait.
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/fork.h"
#include "node/process.h"
#include "python/bind.h"
#include "python/blocks.h"
#include "python/interruptible.h"
#include "van/van.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace bps::python {
namespace {

using MayWait = py::call_guard<Interruptible>;
using node::Process;

struct DetachAndDelete {
  std::uint32_t forks = fork_count();
  void operator()(Process* process) const {
    if (forks != fork_count()) return;  // this object is the parent's
    BlockTable::instance().detach(*process);
    delete process;
  }
};

using OwnedProcess = std::unique_ptr<Process, DetachAndDelete>;

// Ends a start() that another thread waits in, or that a signal handler has interrupted.
class Stop {
 public:
  void request() { requested_ = true; }
  void check() const {
    if (!requested_) return;
    throw Error(ErrorCode::kNotInitialized, "shutdown() was called before init() was complete", "call init() again");
  }

 private:
  std::atomic<bool> requested_{false};
};

// A worker forgets the memory of arrays that are freed from its start to its shutdown.
OwnedProcess start(const SettingValues& config, const node::Startup& startup, const Stop& stop) {
  const InterruptScope scope([&stop] { stop.check(); });
  OwnedProcess process(Process::start(config.parse(), startup).release());
  check_interrupt();
  if (startup.worker_rank != van::kNoRank) BlockTable::instance().attach(*process);
  return process;
}

OwnedProcess renew(Process& ended, const Stop& stop) {
  const InterruptScope scope([&stop] { stop.check(); });
  BlockTable::instance().detach(ended);
  OwnedProcess process(Process::renew(ended).release());
  check_interrupt();
  BlockTable::instance().attach(*process);
  return process;
}

bool shutdown(Process& process, double timeout_s, bool suspends) {
  BlockTable::instance().detach(process);
  return process.shutdown(checked_timeout(timeout_s), suspends);
}

bool depart(Process& process, double timeout_s) {
  BlockTable::instance().detach(process);
  return process.depart(checked_timeout(timeout_s));
}

// Wraps `function` as a call into the process; see Process::Call.
template <typename R, typename... Args>
auto as_call(R (*function)(Process&, Args...)) {
  return [function](Process& process, Args... args) {
    const Process::Call call(process);
    return function(process, std::forward<Args>(args)...);
  };
}

std::vector<std::uint64_t> worker_identities(Process& process) {
  std::vector<std::uint64_t> identities;
  for (std::uint32_t rank = 0; rank < process.van().membership().workers; ++rank) {
    identities.push_back(process.van().membership().worker(rank)->identity);
  }
  return identities;
}

std::vector<std::uint64_t> server_identities(Process& process) {
  std::vector<std::uint64_t> identities;
  for (std::uint32_t rank = 0; rank < process.van().membership().servers; ++rank) {
    identities.push_back(process.van().membership().server(rank)->identity);
  }
  return identities;
}

using Sample = std::tuple<std::string, std::map<std::string, std::string>, double>;
using Family = std::tuple<std::string, std::string, std::string, std::vector<Sample>>;

std::vector<Family> metric_families(Process& process) {
  std::vector<Family> families;
  for (const MetricFamily& family : process.report().metric_families()) {
    std::vector<Sample> samples;
    for (const MetricFamily::Sample& one : family.samples) {
      samples.emplace_back(one.suffix, std::map<std::string, std::string>(one.labels.begin(), one.labels.end()),
                           one.value);
    }
    families.emplace_back(family.name, std::string(name_of(family.type)), family.help, std::move(samples));
  }
  return families;
}

using Spec = std::tuple<std::uint32_t, std::string, Dtype, std::uint64_t, std::string, std::string>;

std::vector<std::shared_ptr<worker::Tensor>> declare(Process& process, const std::vector<Spec>& specs) {
  std::vector<van::TensorSpec> tensors;
  for (const auto& [group, name, dtype, count, shape, compression] : specs) {
    tensors.push_back({group, name, static_cast<std::uint8_t>(dtype), count, shape, compression});
  }
  return process.worker().declarations().declare(tensors);
}

using ProcessClass = py::class_<Process, OwnedProcess>;

void bind_startup(py::module_& module) {
  py::class_<node::Startup>(module, "Startup", "Who this process is in the job.")
      .def(py::init<>())
      .def_readwrite("worker_rank", &node::Startup::worker_rank)
      .def_readwrite("server_rank", &node::Startup::server_rank)
      .def_readwrite("workers", &node::Startup::workers)
      .def_readwrite("servers", &node::Startup::servers)
      .def_readwrite("hosts_scheduler", &node::Startup::hosts_scheduler)
      .def_readwrite("joint", &node::Startup::joint)
      .def_readwrite("resumes", &node::Startup::resumes)
      .def_readwrite("scheduler_host", &node::Startup::scheduler_host)
      .def_readwrite("scheduler_ports", &node::Startup::scheduler_ports)
      .def_readwrite("processes_on_host", &node::Startup::processes_on_host)
      .def_readwrite("job", &node::Startup::job)
      .def_readwrite("scheduler_hint", &node::Startup::scheduler_hint)
      .def_property(
          "command", [](const node::Startup& startup) { return startup.origin.command; },
          [](node::Startup& startup, const std::string& command) { startup.origin.command = command; },
          "By which ranks of two jobs are told apart; see csrc/van/origin.h.");

  py::class_<Stop>(module, "Stop", "Ends a start of a process before it is complete.")
      .def(py::init<>())
      .def("request", &Stop::request);
}

// These take a process into its next view.
void bind_views(ProcessClass& process) {
  process.def_property_readonly("view_ended", &Process::view_ended)
      .def_property_readonly("survives_servers", &Process::survives_servers,
                             "Whether operations go on when a server is lost.")
      .def_property_readonly("can_go_on", &Process::can_go_on,
                             "Of a process that has been renewed: nothing was done that does not survive.")
      .def("take_incomplete", &Process::take_incomplete, "Of a process that has been renewed.")
      .def("declare_like",
           as_call(+[](Process& p, const std::shared_ptr<worker::Tensor>& like, std::uint32_t group,
                       const std::string& name) { return p.worker().declarations().declare_like(*like, group, name); }),
           py::arg("like"), py::arg("group"), py::arg("name"), MayWait(),
           "A name that is used once, in the partitions of a tensor of an earlier view.")
      .def("resume",
           as_call(+[](Process& p, const std::shared_ptr<worker::Tensor>& tensor,
                       const std::shared_ptr<worker::Operation>& suspended, std::uint32_t round,
                       const std::vector<std::uint32_t>& only) {
             return p.worker().resume(tensor, *suspended, round, only);
           }),
           py::arg("tensor"), py::arg("suspended"), py::arg("round"), py::arg("only"), MayWait(),
           "Goes on with an operation, or with these partitions of it, as this round of a tensor of this view.")
      .def("refuse",
           as_call(+[](Process& p, const std::shared_ptr<worker::Tensor>& tensor,
                       const std::shared_ptr<worker::Operation>& late, std::uint32_t round,
                       const std::string& why) { p.worker().refuse(tensor, *late, round, why); }),
           py::arg("tensor"), py::arg("late"), py::arg("round"), py::arg("why"), MayWait(),
           "Fails this round of a tensor of this view on all ranks that come to it.");
}

void bind_facts(ProcessClass& process) {
  process
      .def_property_readonly("address", as_call(+[](Process& p) { return p.address(); }),
                             "By which the other members reach this host.")
      .def_property_readonly("epoch", as_call(+[](Process& p) { return p.van().membership().epoch; }))
      .def_property_readonly("is_late", as_call(+[](Process& p) { return p.van().is_late(); }),
                             "Whether others have state of the job, and this process has not.")
      .def_property_readonly("has_entrants", as_call(+[](Process& p) { return p.van().membership().has_entrants(); }),
                             "Whether some workers have state of the job, and others have not.")
      .def_property_readonly("identities", as_call(&worker_identities),
                             "By rank: a number of its process that is the same in all views.")
      .def_property_readonly("server_identities", as_call(&server_identities),
                             "By server rank: a number of its process that is the same in all views.")
      .def_property_readonly("transports", as_call(+[](Process& p) { return p.report().transports(); }))
      .def_property_readonly("is_authenticated", as_call(+[](Process& p) { return p.is_authenticated(); }))
      .def_property_readonly("timeout_s", as_call(+[](Process& p) { return p.operation_timeout_s(); }))
      .def_property_readonly("workers", as_call(+[](Process& p) { return p.van().membership().workers; }))
      .def_property_readonly("servers", as_call(+[](Process& p) { return p.van().membership().servers; }))
      .def_property_readonly("rank", as_call(+[](Process& p) { return p.worker().declarations().rank(); }))
      .def("describe", as_call(+[](Process& p) {
             std::vector<std::string> nodes;
             for (const van::Node& node : p.van().membership().nodes) nodes.push_back(node.describe());
             return nodes;
           }))
      .def("servers_of",
           as_call(+[](Process& p, const worker::Tensor& t) { return p.worker().planner().places().servers_of(t); }),
           py::arg("tensor"), "By partition: the rank of the server that sums it.");
}

void bind_end(ProcessClass& process) {
  process
      .def("shutdown", &shutdown, py::arg("timeout_s"), py::arg("suspends") = false, MayWait(),
           "Leaves the job. False if the others did not all leave in time, or a member was lost.")
      .def("depart", &depart, py::arg("timeout_s"), MayWait(),
           "Leaves the job without waiting for the others, for whom servers and a scheduler here go on until stay() "
           "ends. "
           "False if it has left already.")
      .def("stay", &Process::stay, MayWait(),
           "After depart(): waits until all others have left, too, or for end_stay().")
      .def("end_stay", &Process::end_stay, py::call_guard<py::gil_scoped_release>(), "Ends stay(); from any thread.")
      .def_property_readonly("is_down", &Process::is_down, "After shutdown(): whether nothing of it is left.")
      .def("abort", &Process::abort, py::arg("exception"), MayWait(),
           "Tells all members that this process ends with an exception, before its shutdown.")
      .def("wait_for_end", as_call(+[](Process& p) { return p.van().wait_for_end(); }), MayWait());
}

// These tell people how a process does.
void bind_reports(ProcessClass& process) {
  process.def("metrics", as_call(+[](Process& p) { return p.report().metrics(); }), MayWait())
      .def("metric_families", as_call(&metric_families), MayWait(),
           "(name, type, help, [(suffix, labels, value)]) of each family that Prometheus is told.")
      .def("dump", as_call(+[](Process& p) { return p.report().dump(false); }), MayWait(),
           "JSON: the operations that are not finished, and the rounds that servers of this process have open.")
      .def_property_readonly("is_traced", as_call(+[](Process& p) { return p.trace() != nullptr; }))
      .def("trace_span",
           as_call(+[](Process& p, const std::string& name, std::uint32_t step, std::uint64_t begin_ns,
                       std::uint64_t end_ns) {
             if (p.trace() != nullptr) p.trace()->record_span(name, step, begin_ns, end_ns);
           }),
           py::arg("name"), py::arg("step"), py::arg("begin_ns"), py::arg("end_ns"),
           "Adds what the program did in one of its steps to the trace. Times are those of time.monotonic_ns().");
}

void bind_calls(ProcessClass& process) {
  process
      .def("barrier", as_call(+[](Process& p, std::uint32_t group, double timeout_s) {
             p.van().barrier(*p.worker().declarations().group(group), checked_timeout(timeout_s));
           }),
           py::arg("group"), py::arg("timeout_s"), MayWait())
      .def("end_step", as_call(+[](Process& p, std::uint32_t group, double timeout_s) {
             p.van().end_step(*p.worker().declarations().group(group), checked_timeout(timeout_s));
           }),
           py::arg("group"), py::arg("timeout_s"), MayWait(),
           "As barrier, where processes that wait to enter the job may do so.")
      .def("new_group",
           as_call(+[](Process& p, std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s) {
             return p.worker().declarations().new_group(std::move(ranks), name, checked_timeout(timeout_s)).id;
           }),
           py::arg("ranks"), py::arg("name"), py::arg("timeout_s"), MayWait())
      .def("declare", as_call(&declare), py::arg("tensors"), MayWait(),
           "tensors: (group, name, dtype, count, shape, compression or \"\") each.");
}

}  // namespace

void bind_process(py::module_& module) {
  bind_startup(module);
  ProcessClass process(module, "Process", "This process as a member of a job.");
  process.def_static("start", &start, py::arg("config"), py::arg("startup"), py::arg("stop"), MayWait())
      .def_static("renew", &renew, py::arg("ended"), py::arg("stop"), MayWait(),
                  "The process in the view that follows one that has ended.");
  bind_views(process);
  bind_facts(process);
  bind_end(process);
  bind_reports(process);
  bind_calls(process);
}

}  // namespace bps::python
