// SPDX-License-Identifier: Apache-2.0
// Holds the functions of the package that this module calls. The package registers them when it is imported, so this
// module does not know the package's modules by name. The GIL is held for all of it.
#pragma once

#include <pybind11/pybind11.h>

namespace bps::python {

struct Hooks {
  pybind11::object note_view_end;  // called before a RoundAbortedError is raised: the caller knows from then on
  pybind11::object resume;         // goes into the next view with what is under way
  pybind11::object rebound;        // gives a prepared operation its process and tensor in the next view; None: none
  pybind11::object awaiting;       // implements `await` of a handle
  pybind11::object stream_of;      // the stream in which an array of a GPU is made and used now
};

// The hooks are never destroyed: at the end of the process there is no interpreter any more.
Hooks& hooks();

}  // namespace bps::python
