// What the classic variables say about the job, for the plain binaries.
#pragma once

#include "core/config.h"
#include "node/process.h"

namespace bps::node {

// Counts, scheduler address and secret; the ranks stay kNoRank. Throws kInvalidArgument naming what is missing.
Startup startup_from_environment(const Config& config);

}  // namespace bps::node
