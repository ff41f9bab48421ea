// SPDX-License-Identifier: Apache-2.0
// A process of the job, its operations and its tensors. The GIL is released wherever C++ may wait.
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <span>

#include "core/fork.h"
#include "node/process.h"
#include "python/bind.h"
#include "python/blocks.h"
#include "python/handle.h"
#include "python/interruptible.h"
#include "python/memory.h"
#include "van/van.h"
#include "worker/worker.h"

namespace py = pybind11;

namespace bps::python {
namespace {

using MayWait = py::call_guard<Interruptible>;
using node::Process;

void bind_declared(py::module_& module) {
  py::class_<worker::Tensor, std::shared_ptr<worker::Tensor>>(module, "Tensor", "A declared name.")
      .def_readonly("name", &worker::Tensor::name)
      .def_readonly("id", &worker::Tensor::id)
      .def_readonly("bytes", &worker::Tensor::bytes)
      .def_readonly("member", &worker::Tensor::member)
      .def_readonly("dtype", &worker::Tensor::dtype)
      .def_readonly("shape", &worker::Tensor::shape)
      .def_property_readonly(
          "compression", [](const worker::Tensor& t) { return t.compression; }, "As it was declared; empty: none.")
      .def_property_readonly("elements", [](const worker::Tensor& t) { return t.bytes / size_of(t.dtype); })
      .def_property_readonly("group", [](const worker::Tensor& t) { return t.group->id; })
      .def_property(
          "next_round", [](const worker::Tensor& t) { return t.next_round.load(); },
          [](worker::Tensor& t, std::uint32_t round) {
            t.next_round.store(round);
            t.next_pull.store(round);
          },
          "The round of the next operation on it; set before its first one.")
      .def(
          "fits",
          [](const worker::Tensor& t, const Memory& memory, std::uint64_t elements) {
            return t.dtype == memory.dtype && t.bytes == elements * size_of(memory.dtype);
          },
          py::arg("memory"), py::arg("elements"), "Whether `elements` of the dtype of `memory` are what was declared.")
      .def(
          "copy_feedback",
          [](worker::Tensor& t, bool momentum, const Memory& memory, bool writes) {
            if (!t.compressor) return false;
            const auto all = t.compressor->remembered(t.whole);
            const std::span<float> kept = momentum ? all.momentum : all.residual;
            if (kept.empty()) return false;
            if (memory.nbytes != kept.size_bytes()) {
              throw Error(ErrorCode::kInvalidArgument,
                          std::to_string(memory.elements) + " elements are not what '" + t.name + "' has",
                          "pass what was saved of a tensor of this size");
            }
            auto* const bytes = reinterpret_cast<std::byte*>(kept.data());
            std::memcpy(writes ? bytes : memory.address, writes ? memory.address : bytes, memory.nbytes);
            return true;
          },
          py::arg("momentum"), py::arg("memory"), py::arg("writes"),
          "Copies what this rank remembers of push_pulls, while none is in progress. False: it remembers nothing.")
      .def_property_readonly("partitions", [](const worker::Tensor& t) { return t.whole.count(); })
      .def_property_readonly("group_size", [](const worker::Tensor& t) { return t.group->size(); })
      .def_property_readonly(
          "server_bytes",
          [](const worker::Tensor& t) {
            std::vector<std::uint64_t> bytes(t.whole_plan.size(), 0);
            for (std::size_t place = 0; place < t.whole_plan.size(); ++place) {
              for (const worker::Part& part : t.whole_plan[place]) bytes[place] += t.whole.piece(part.partition).length;
            }
            return bytes;
          },
          "Bytes of push_pull by [loop of this worker x loop of a server, or of a relay of this host].");
}

// Without the name of the operation, which each rank says itself.
std::string lateness(const worker::Operation& operation) {
  const auto why = operation.failure();
  if (!why || why->code() != ErrorCode::kTimeout) return "";
  return std::string(why->what()).substr(operation.describe().size() + 2);
}

std::map<std::uint32_t, std::uint64_t> by_partition(const std::vector<worker::Begun>& all) {
  std::map<std::uint32_t, std::uint64_t> found;
  for (const auto& [partition, bytes] : all) found[partition] = bytes;
  return found;
}

// What job.py needs to go on with operations in the next view.
void bind_suspended(py::module_& module) {
  using worker::Operation;
  py::class_<Operation, std::shared_ptr<Operation>>(module, "Suspended", "An operation whose view has ended.")
      .def_property_readonly("tensor", [](const Operation& o) { return o.tensor; })
      .def_readonly("round", &Operation::round)
      .def_property_readonly(
          "missing", [](const Operation& o) { return by_partition(o.suspension().missing()); },
          "Of partitions whose result is wanted here and lacks: the bytes of it that have come over the output. The "
          "rest of the input is as it was.")
      .def_property_readonly(
          "whole", [](const Operation& o) { return by_partition(o.suspension().whole()); },
          "Partitions whose result is wanted here and has come, and its bytes.")
      .def(
          "length", [](const Operation& o, std::uint32_t partition) { return o.suspension().length(partition); },
          py::arg("partition"), "Bytes of its result.")
      .def(
          "read",
          [](const Operation& o, std::uint32_t partition, const Memory& into) {
            o.suspension().read(partition, {into.address, static_cast<std::size_t>(into.nbytes)});
          },
          py::arg("partition"), py::arg("into"), "The first bytes of the result of a partition.")
      .def(
          "write",
          [](Operation& o, std::uint32_t partition, const Memory& from) {
            o.suspension().write(partition, {from.address, static_cast<std::size_t>(from.nbytes)});
          },
          py::arg("partition"), py::arg("from_"), "They come from another rank.")
      .def(
          "take_landed", [](Operation& o) { o.suspension().take_landed(); },
          "Takes the results that have landed in buffers.")
      .def_property_readonly(
          "has_failed", [](const Operation& o) { return !o.is_suspended(); },
          "At its deadline, on all ranks: its caller knows.")
      .def_property_readonly("lateness", &lateness, "Why it is not to be started again; empty where it may be.")
      .def("complete", [](Operation& o) { o.suspension().resolve(worker::Resumption::kComplete); })
      .def("abort", [](Operation& o) { o.suspension().resolve(worker::Resumption::kAborted); })
      .def(
          "fail",
          [](Operation& o, const std::string& why) {
            o.abort_suspended(Error(ErrorCode::kTimeout, o.describe() + ": " + why, kRaiseTimeout));
          },
          py::arg("why"), "Its deadline has passed on another rank.")
      .def(
          "continue_by",
          [](Operation& o, const std::shared_ptr<Operation>& by) {
            o.suspension().resolve(worker::Resumption::kContinued, by);
          },
          py::arg("by"));
}

struct DetachAndDelete {
  std::uint32_t forks = fork_count();
  void operator()(Process* process) const {
    if (forks != fork_count()) return;  // it is the parent's
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

// `function` as a call into the process; see Process::Call.
template <typename R, typename... Args>
auto as_call(R (*function)(Process&, Args...)) {
  return [function](Process& process, Args... args) {
    const Process::Call call(process);
    return function(process, std::forward<Args>(args)...);
  };
}

}  // namespace

void bind_process(py::module_& module) {
  bind_declared(module);
  bind_suspended(module);

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

  using Specs = std::vector<std::tuple<std::uint32_t, std::string, Dtype, std::uint64_t, std::string, std::string>>;
  py::class_<Process, OwnedProcess>(module, "Process", "This process as a member of a job.")
      .def_static("start", &start, py::arg("config"), py::arg("startup"), py::arg("stop"), MayWait())
      .def_static("renew", &renew, py::arg("ended"), py::arg("stop"), MayWait(),
                  "The process in the view that follows one that has ended.")
      .def_property_readonly("view_ended", &Process::view_ended)
      .def_property_readonly("survives_servers", &Process::two_phase, "Whether operations go on when a server is lost.")
      .def_property_readonly("can_go_on", &Process::can_go_on,
                             "Of a process that has been renewed: nothing was done that does not survive.")
      .def("take_incomplete", &Process::take_incomplete, "Of a process that has been renewed.")
      .def("declare_like",
           as_call(+[](Process& p, const std::shared_ptr<worker::Tensor>& like, std::uint32_t group,
                       const std::string& name) { return p.worker().declare_like(*like, group, name); }),
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
           "Fails this round of a tensor of this view on all ranks that come to it.")
      .def_property_readonly("address", as_call(+[](Process& p) { return p.address(); }),
                             "By which the other members reach this host.")
      .def_property_readonly("epoch", as_call(+[](Process& p) { return p.membership().epoch; }))
      .def_property_readonly("is_late", as_call(+[](Process& p) {
                               const auto has_state = [](const van::Node& node) { return node.has_state; };
                               return !has_state(p.van().self()) &&
                                      std::ranges::any_of(p.membership().nodes, has_state);
                             }),
                             "Whether others have state of the job, and this process has not.")
      .def_property_readonly("identities", as_call(+[](Process& p) {
                               std::vector<std::uint64_t> identities;
                               for (std::uint32_t rank = 0; rank < p.membership().workers; ++rank) {
                                 identities.push_back(p.membership().worker(rank)->identity);
                               }
                               return identities;
                             }),
                             "By rank: a number of its process that is the same in all views.")
      .def_property_readonly("server_identities", as_call(+[](Process& p) {
                               std::vector<std::uint64_t> identities;
                               for (std::uint32_t rank = 0; rank < p.membership().servers; ++rank) {
                                 identities.push_back(p.membership().server(rank)->identity);
                               }
                               return identities;
                             }),
                             "By server rank: a number of its process that is the same in all views.")
      .def("servers_of",
           as_call(+[](Process& p, const worker::Tensor& t) { return p.worker().places().servers_of(t); }),
           py::arg("tensor"), "By partition: the rank of the server that sums it.")
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
      .def("wait_for_end", as_call(+[](Process& p) { return p.wait_for_end(); }), MayWait())
      .def("metrics", as_call(+[](Process& p) { return p.metrics(); }), MayWait())
      .def("metric_families", as_call(+[](Process& p) {
             using Sample = std::tuple<std::string, std::map<std::string, std::string>, double>;
             std::vector<std::tuple<std::string, std::string, std::string, std::vector<Sample>>> families;
             for (const MetricFamily& family : p.metric_families()) {
               std::vector<Sample> samples;
               for (const MetricFamily::Sample& one : family.samples) {
                 samples.emplace_back(
                     one.suffix, std::map<std::string, std::string>(one.labels.begin(), one.labels.end()), one.value);
               }
               families.emplace_back(family.name, std::string(name_of(family.type)), family.help, std::move(samples));
             }
             return families;
           }),
           MayWait(), "(name, type, help, [(suffix, labels, value)]) of each family that Prometheus is told.")
      .def("dump", as_call(+[](Process& p) { return p.dump(false); }), MayWait(),
           "JSON: the operations that are not finished, and the rounds that servers of this process have open.")
      .def_property_readonly("is_traced", as_call(+[](Process& p) { return p.is_traced(); }))
      .def("trace_span",
           as_call(+[](Process& p, const std::string& name, std::uint32_t step, std::uint64_t begin_ns,
                       std::uint64_t end_ns) { p.trace_span(name, step, begin_ns, end_ns); }),
           py::arg("name"), py::arg("step"), py::arg("begin_ns"), py::arg("end_ns"),
           "Adds what the program did in one of its steps to the trace. Times are those of time.monotonic_ns().")
      .def_property_readonly("routes", as_call(+[](Process& p) { return p.routes(); }))
      .def_property_readonly("is_authenticated", as_call(+[](Process& p) { return p.is_authenticated(); }))
      .def_property_readonly("timeout_s", as_call(+[](Process& p) { return p.operation_timeout_s(); }))
      .def_property_readonly("workers", as_call(+[](Process& p) { return p.membership().workers; }))
      .def_property_readonly("servers", as_call(+[](Process& p) { return p.membership().servers; }))
      .def_property_readonly("rank", as_call(+[](Process& p) { return p.worker().rank(); }))
      .def("describe", as_call(+[](Process& p) {
             std::vector<std::string> nodes;
             for (const van::Node& node : p.membership().nodes) nodes.push_back(node.describe());
             return nodes;
           }))
      .def("barrier", as_call(+[](Process& p, std::uint32_t group, double timeout_s) {
             p.van().barrier(*p.worker().group(group), checked_timeout(timeout_s));
           }),
           py::arg("group"), py::arg("timeout_s"), MayWait())
      .def("end_step", as_call(+[](Process& p, std::uint32_t group, double timeout_s) {
             p.van().end_step(*p.worker().group(group), checked_timeout(timeout_s));
           }),
           py::arg("group"), py::arg("timeout_s"), MayWait(),
           "As barrier, where processes that wait to enter the job may do so.")
      .def("new_group",
           as_call(+[](Process& p, std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s) {
             return p.worker().new_group(std::move(ranks), name, checked_timeout(timeout_s)).id;
           }),
           py::arg("ranks"), py::arg("name"), py::arg("timeout_s"), MayWait())
      .def("declare", as_call(+[](Process& p, const Specs& specs) {
             std::vector<van::TensorSpec> tensors;
             for (const auto& [group, name, dtype, count, shape, compression] : specs) {
               tensors.push_back({group, name, static_cast<std::uint8_t>(dtype), count, shape, compression});
             }
             return p.worker().declare(tensors);
           }),
           py::arg("tensors"), MayWait(), "tensors: (group, name, dtype, count, shape, compression or \"\") each.")
      .def(
          "start_operation",
          [](Process& p, const std::shared_ptr<worker::Tensor>& tensor, tensor::OperationKind kind, ReduceOp op,
             const Memory& source, const Memory& target, py::object result, bool pushes, bool pulls, std::uint32_t root,
             std::int32_t priority, bool awaited, std::optional<double> timeout_s, bool survives, bool again) {
            worker::Request request;
            request.kind = kind;
            request.op = op;
            request.pushes = pushes;
            request.pulls = pulls;
            if (kind == tensor::OperationKind::kAccumulate) {
              request.addition.most_ahead = static_cast<std::uint16_t>(root);
              request.again = again;
            } else {
              request.root = root;
            }
            request.input = source.address;
            request.output = target.address;
            request.input_allocation = source.block;
            request.output_allocation = target.block;
            request.priority = priority;
            request.awaited = awaited;
            request.two_phase = survives;
            const auto start = [&] {
              const WithoutGil released;
              const Process::Call call(p);
              request.timeout_s = timeout_s ? checked_timeout(*timeout_s) : p.operation_timeout_s();
              return p.worker().start(tensor, request);
            };
            return std::make_unique<Handle>(start(), std::move(result), source.keep, target.keep);
          },
          py::arg("tensor"), py::arg("kind"), py::arg("op"), py::arg("source"), py::arg("target"), py::arg("result"),
          py::arg("pushes"), py::arg("pulls"), py::arg("root"), py::arg("priority"), py::arg("awaited"),
          py::arg("timeout_s") = py::none(), py::arg("survives") = true, py::arg("again") = false,
          "awaited: the caller waits next. timeout_s: None is the job's. survives: with BPS_SERVER_FAILOVER the loss "
          "of "
          "a server does not abort it.");
}

}  // namespace bps::python
