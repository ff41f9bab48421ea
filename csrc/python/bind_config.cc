// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include "compress/compression.h"
#include "core/error.h"
#include "core/log.h"
#include "core/settings.h"
#include "core/unknown_settings.h"
#include "python/bind.h"

namespace py = pybind11;

namespace bps::python {

void bind_config(py::module_& module) {
  py::class_<SettingValues>(module, "Config", "Every setting with its value and source; see bps_rdma.config().")
      .def(py::init<>(), "Reads the environment of this process.")
      .def("set", &SettingValues::set, py::arg("name"), py::arg("value"), py::arg("source") = "argument")
      .def(
          "check",
          [](const SettingValues& config) {
            const Settings settings = config.parse();
            if (settings.worker.compression.empty()) return;
            (void)compress::parse_compression(settings.worker.compression);
            if (settings.worker.exact) {
              throw Error(ErrorCode::kInvalidArgument, "BPS_COMPRESSION and BPS_EXACT are both set",
                          "unset one of them: what is compressed is not exact");
            }
          },
          "Raises InvalidArgumentError for the first value outside its range.")
      .def(
          "text", [](const SettingValues& config, const std::string& name) { return config.value(name).text; },
          py::arg("name"))
      .def(
          "source", [](const SettingValues& config, const std::string& name) { return config.value(name).source; },
          py::arg("name"))
      .def("integer", &SettingValues::integer, py::arg("name"))
      .def("seconds", &SettingValues::seconds, py::arg("name"))
      .def_static(
          "table",
          [] {
            std::vector<std::tuple<std::string, std::string, std::string, std::string, bool>> rows;
            for (const Setting& s : settings_table()) {
              rows.emplace_back(std::string(s.name), std::string(s.aliases), std::string(s.fallback),
                                std::string(s.help), s.secret);
            }
            return rows;
          },
          "Rows of (name, aliases, default, help, secret).");
  module.def("log_warning", &log_warning, py::arg("text"), "One line on standard error; see BPS_LOG_LEVEL.");
  module.def("log_info", &log_info, py::arg("text"));
  module.def(
      "check_environment",
      [] {
        std::vector<std::tuple<std::string, std::string, bool>> notes;
        for (const SettingNote& note : check_environment()) notes.emplace_back(note.variable, note.text, note.warning);
        return notes;
      },
      "(variable, sentence, is a warning) for each BPS_*, BYTEPS_* and DMLC_* variable that has no effect here.");
}

}  // namespace bps::python
