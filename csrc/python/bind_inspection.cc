// SPDX-License-Identifier: Apache-2.0
// Answers `bps why`, `bps top`, `bps dump` and `bps trace`.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "core/settings.h"
#include "core/trace_format.h"
#include "node/job_secret.h"
#include "node/stacks.h"
#include "node/startup.h"
#include "python/bind.h"
#include "python/interruptible.h"
#include "python/stacks.h"
#include "van/ask_scheduler.h"

namespace py = pybind11;

namespace bps::python {
namespace {

std::pair<std::string, std::vector<std::string>> ask_job(const SettingValues& config, const std::string& host,
                                                         std::uint16_t port, bool stacks, double timeout_s) {
  const Settings settings = config.parse();
  node::Startup startup;
  startup.scheduler_host = host;
  startup.job = settings.job.id;
  const node::JobSecret secret = node::job_secret(settings.job, startup);
  van::JobState state =
      van::ask_scheduler(host, {port}, secret.credentials, stacks, Deadline::after(checked_timeout(timeout_s)));
  std::vector<std::string> reports;
  for (auto& [node, report] : state.told) reports.push_back(std::move(report));
  return {std::move(state.scheduler), std::move(reports)};
}

}  // namespace

void bind_inspection(py::module_& module) {
  module.attr("MOST_STACK_BYTES") = kMostStackBytes;
  module.def(
      "show_stacks_by",
      [](std::function<std::string()> text, int signal, int file) {
        node::show_stacks_by(shows_stacks(std::move(text), signal, file));
      },
      py::arg("text"), py::arg("signal"), py::arg("file"),
      "How `bps why` gets the stacks of all threads: by `text`, or by this signal, whose handler writes to `file`.");
  module.def(
      "hide_stacks",
      [] {
        const WithoutGil unlocked;  // a thread for which this waits may wait for the GIL
        node::show_stacks_by(nullptr);
        await_stacks();
      },
      "The end of show_stacks_by().");
  module.def("ask_job", &ask_job, py::arg("config"), py::arg("host"), py::arg("port"), py::arg("stacks"),
             py::arg("timeout_s"), py::call_guard<Interruptible>(),
             "JSON: what the scheduler at this address knows, and the reports of the members that reply in time.");
  module.def(
      "format_trace", [](const std::string& events, const std::string& json) { format_trace(events, json); },
      py::arg("events"), py::arg("json"), py::call_guard<WithoutGil>(),
      "Makes the file `json` from what a process that was killed, or still runs, has traced into the file `events`.");
}

}  // namespace bps::python
