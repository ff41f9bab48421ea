// SPDX-License-Identifier: Apache-2.0
// Decides whether and where a process traces, by pure functions.
#pragma once

#include <memory>

#include "core/settings.h"
#include "core/trace_writer.h"
#include "van/membership.h"

namespace bps::node {

// Returns null when nothing is traced.
std::unique_ptr<TraceWriter> make_trace(const TraceSettings& settings);
// Says who this process is, and where it writes: in a folder for each rank, as several hosts may share the disk. With
// BytePS's variables it is a folder for each local rank, as there. Views after the first one have files of their own.
TraceWriter::Process traced_process(const Settings& settings, const van::Node& self, const van::Membership& members);

}  // namespace bps::node
