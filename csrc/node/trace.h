// SPDX-License-Identifier: Apache-2.0
// Decides whether and where a process traces. Threading: pure.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/settings.h"
#include "core/trace_writer.h"
#include "van/membership.h"

namespace bps::node {

// nullptr when nothing is traced.
std::unique_ptr<TraceWriter> make_trace(const TraceSettings& settings);
// The place where this process writes it: a folder for each rank, as several hosts may share the disk; with BytePS's
// variables a folder for each local rank, as there. Views after the first one have files of their own.
std::string trace_file(const TraceSettings& settings, const van::Node& self, std::uint32_t local_rank,
                       std::uint32_t epoch);

}  // namespace bps::node
