// SPDX-License-Identifier: Apache-2.0
#include "python/bind.h"
#include "python/hooks.h"

namespace py = pybind11;

namespace bps::python {

Hooks& hooks() {
  static auto* const all = new Hooks;
  return *all;
}

void bind_hooks(py::module_& module) {
  module.def(
      "register_view_hooks",
      [](py::object note_view_end, py::object resume, py::object rebound) {
        hooks().note_view_end = std::move(note_view_end);
        hooks().resume = std::move(resume);
        hooks().rebound = std::move(rebound);
      },
      py::kw_only(), py::arg("note_view_end"), py::arg("resume"), py::arg("rebound"),
      "What to call when a view has ended; see bps_rdma.job.");
  module.def(
      "register_awaiting", [](py::object awaiting) { hooks().awaiting = std::move(awaiting); }, py::arg("awaiting"),
      "What implements `await` of a handle; see bps_rdma.handle.");
  module.def(
      "register_stream_of", [](py::object stream_of) { hooks().stream_of = std::move(stream_of); },
      py::arg("stream_of"), "What finds the stream of an array of a GPU; see bps_rdma.devices.");
}

}  // namespace bps::python
