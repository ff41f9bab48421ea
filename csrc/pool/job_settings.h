// SPDX-License-Identifier: Apache-2.0
// Tells which settings a server of a pool has from its job, and which from the pool.
//
// A job says what all its members have to agree on: who takes part, where the scheduler is, how long to wait. It cannot
// name files, programs, ports or interfaces. Those are the pool's affair, which has them from its own environment.
#pragma once

#include <string>
#include <vector>

#include "core/settings.h"
#include "pool/messages.h"

namespace bps::pool {

// Returns those of the job that are not left to their default. Throws kInvalidArgument for one that is too long.
NamedValues settings_of_job(const SettingValues& values);
// Throws kInvalidArgument unless a server can be started with them.
void check_settings(const NamedValues& settings);
// Returns NAME=VALUE of this process, without what would tell it of another job, and then of the job.
std::vector<std::string> environment_of_server(const NamedValues& settings);

}  // namespace bps::pool
