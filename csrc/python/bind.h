// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "python/enums.h"  // in every file that converts one, or their conversions would differ

namespace bps::python {

void bind_errors(pybind11::module_& module);
void bind_compress(pybind11::module_& module);
void bind_config(pybind11::module_& module);
void bind_declared(pybind11::module_& module);
void bind_doctor(pybind11::module_& module);
void bind_exact(pybind11::module_& module);
void bind_inspection(pybind11::module_& module);
void bind_handle(pybind11::module_& module);
void bind_hooks(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_message(pybind11::module_& module);
void bind_operations(pybind11::module_& module);
void bind_pool(pybind11::module_& module);
void bind_process(pybind11::module_& module);
void bind_tensor(pybind11::module_& module);

}  // namespace bps::python
