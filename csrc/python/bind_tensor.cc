// The pure functions of placement, for tests and tools.
#include <pybind11/stl.h>

#include "python/bind.h"
#include "tensor/key_map.h"
#include "tensor/partition.h"

namespace py = pybind11;

namespace bps {

void bind_tensor(py::module_& module) {
  module.def("make_key", &make_key, py::arg("tensor"), py::arg("partition"));
  module.def("djb2", &djb2, py::arg("key"));
  module.def("sdbm", &sdbm, py::arg("key"));
  module.def("naive", &naive, py::arg("key"));
  module.def(
      "server_of",
      [](const std::string& hash, std::uint32_t servers, std::uint32_t workers, std::uint32_t tensor,
         std::uint64_t partition) {
        KeyMapConfig config;
        config.hash = parse_key_hash(hash);
        config.servers = servers;
        config.workers = workers;
        return server_of(config, tensor, partition);
      },
      py::arg("hash"), py::arg("servers"), py::arg("workers"), py::arg("tensor"), py::arg("partition"));
}

}  // namespace bps
