#include <pybind11/pybind11.h>

#include <cstring>

#include "core/error.h"
#include "python/bind.h"
#include "transport/shm/shared_memory.h"

namespace py = pybind11;

namespace bps {

void bind_memory(py::module_& module) {
  module.def(
      "copy_bytes",
      [](std::uintptr_t to, std::uintptr_t from, std::size_t size) {
        std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size);
      },
      py::arg("to"), py::arg("from_"), py::arg("size"), py::call_guard<py::gil_scoped_release>());
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(module, "SharedMemory", py::buffer_protocol(),
                                                          "Bytes that peers on this host can map.")
      .def(py::init(&SharedMemory::create), py::arg("size"), "`size` zeroed bytes; at least 1.")
      .def_property_readonly("address",
                             [](const SharedMemory& m) { return reinterpret_cast<std::uintptr_t>(m.bytes().data()); })
      .def_buffer([](SharedMemory& m) {
        return py::buffer_info(m.bytes().data(), 1, py::format_descriptor<std::uint8_t>::format(), 1,
                               {static_cast<py::ssize_t>(m.bytes().size())}, {1}, false);
      });
}

}  // namespace bps
