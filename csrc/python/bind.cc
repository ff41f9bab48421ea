// SPDX-License-Identifier: Apache-2.0
// Makes the native module. Each C++ face has its own bind file; this one only gathers them.
#include "python/bind.h"
#include "python/interruptible.h"

PYBIND11_MODULE(_core, module, pybind11::mod_gil_not_used()) {
  module.doc() = "The C++ core of bps_rdma. Use the functions of bps_rdma itself.";
  module.attr("__version__") = BPS_VERSION;
#ifdef BPS_WITH_RDMA
  module.attr("with_rdma") = true;
#else
  module.attr("with_rdma") = false;
#endif
  // This function is the first one that this package registers, and so the last one to be called.
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(&bps::python::AwayFromPython::end));
  bps::python::bind_errors(module);
  bps::python::bind_hooks(module);
  bps::python::bind_config(module);
  bps::python::bind_compress(module);
  bps::python::bind_doctor(module);
  bps::python::bind_inspection(module);
  bps::python::bind_tensor(module);
  bps::python::bind_memory(module);
  bps::python::bind_exact(module);
  bps::python::bind_handle(module);
  bps::python::bind_declared(module);
  bps::python::bind_process(module);
  bps::python::bind_pool(module);
  bps::python::bind_operations(module);
  bps::python::bind_message(module);
}
