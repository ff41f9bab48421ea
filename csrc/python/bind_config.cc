#include <pybind11/stl.h>

#include "core/config.h"
#include "python/bind.h"

namespace py = pybind11;

namespace bps::python {

void bind_config(py::module_& module) {
  py::class_<Config>(module, "Config", "Every setting with its value and source; see bps_rdma.config().")
      .def(py::init<>(), "Reads the environment of this process.")
      .def("set", &Config::set, py::arg("name"), py::arg("value"), py::arg("source") = "argument")
      .def("text", &Config::text, py::arg("name"))
      .def(
          "source", [](const Config& config, const std::string& name) { return config.value(name).source; },
          py::arg("name"))
      .def("integer", &Config::integer, py::arg("name"), py::arg("lowest"), py::arg("highest"))
      .def("seconds", &Config::seconds, py::arg("name"))
      .def("flag", &Config::flag, py::arg("name"))
      .def_static(
          "table",
          [] {
            std::vector<std::tuple<std::string, std::string, std::string, std::string>> rows;
            for (const Setting& s : Config::table()) {
              rows.emplace_back(std::string(s.name), std::string(s.aliases), std::string(s.fallback),
                                std::string(s.help));
            }
            return rows;
          },
          "Rows of (name, aliases, default, help).");
}

}  // namespace bps::python
