// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/error.h"

namespace bps::python {

// Sets the exception of Python that stands for an error. Returns false when a signal handler has raised another one
// while Python made it, which is set instead. The GIL is held.
bool set_python_error(const Error& error);

}  // namespace bps::python
