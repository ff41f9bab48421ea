// SPDX-License-Identifier: Apache-2.0
// Reads what the kernel counts of a TCP connection: how fast it delivers what is written to it, and what it has
// carried.
#pragma once

#include "transport/data_endpoint.h"

namespace bps::transport::tcp {

MeasuredRate delivery_rate(int socket);
Carried carried_by(int socket);

}  // namespace bps::transport::tcp
