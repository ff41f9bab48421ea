// SPDX-License-Identifier: Apache-2.0
// Completes a result from the redo log of a server that can write no more (tensor/redo_log.h).
#pragma once

#include "worker/in_flight.h"

namespace bps::worker {

// Repeats the last block that the server wrote, or was about to write, when it ended or failed the round. Returns how
// much of the result is here after that.
Landed redo(const InFlight& entry);

}  // namespace bps::worker
