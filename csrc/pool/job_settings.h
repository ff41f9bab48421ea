// SPDX-License-Identifier: Apache-2.0
// Tells which settings a server of a pool has from its job, and which from the pool.
//
// A job says what all its members have to agree on: who takes part, where the scheduler is, how long to wait. It cannot
// name files, programs, ports or interfaces: those are the pool's affair, which has them from its own environment.
#pragma once

#include <string>
#include <vector>

#include "core/settings.h"
#include "pool/messages.h"

namespace bps::pool {

// Those of the job that are not left to their default. Throws kInvalidArgument for one that is too long to be sent.
NamedValues settings_of_job(const SettingValues& values);
// Throws kInvalidArgument unless a server can be started with them.
void check_settings(const NamedValues& settings);
// NAME=VALUE: that of this process without what would tell it of another job, and then the job's.
std::vector<std::string> environment_of_server(const NamedValues& settings);

}  // namespace bps::pool
