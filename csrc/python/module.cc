// The native module. Each C++ face has its own bind file; this one only gathers them.
#include "python/bind.h"

PYBIND11_MODULE(_core, module, pybind11::mod_gil_not_used()) {
  module.doc() = "The C++ core of bps_rdma. Use the functions of bps_rdma itself.";
  module.attr("__version__") = BPS_VERSION;
  bps::bind_errors(module);
  bps::bind_config(module);
  bps::bind_doctor(module);
  bps::bind_tensor(module);
  bps::bind_memory(module);
  bps::bind_handle(module);
  bps::bind_process(module);
}
