// SPDX-License-Identifier: Apache-2.0
// From what TraceWriter has appended (trace_file.h) to a file in the Trace Event Format, which chrome://tracing and
// Perfetto open.
//
// Threading: pure; the file may still grow. Errors: as in trace_file.h, and kTransport where `json` cannot be written;
// it is then what it was before.
#pragma once

#include <functional>
#include <string>

#include "core/files.h"

namespace bps {

// `file`: open for reading, and `name` what errors call it. `gives_up`: asked often; true ends it with an Error.
void format_trace(int file, const std::string& name, NewFile& json, const std::function<bool()>& gives_up);
void format_trace(const std::string& events, const std::string& json);

}  // namespace bps
