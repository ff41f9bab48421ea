// SPDX-License-Identifier: Apache-2.0
// Makes a file in the Trace Event Format, which chrome://tracing and Perfetto open, from what TraceWriter has appended
// (trace_file.h).
//
// These are pure functions; the file may still grow. They throw as trace_file.h does, and kTransport where `json`
// cannot be written, which is then what it was before.
#pragma once

#include <functional>
#include <string>

#include "core/files.h"

namespace bps {

// `file` is open for reading; errors call it `name`. `gives_up` is called often, and ends it with an Error by true.
void format_trace(int file, const std::string& name, NewFile& json, const std::function<bool()>& gives_up);
void format_trace(const std::string& events, const std::string& json);

}  // namespace bps
