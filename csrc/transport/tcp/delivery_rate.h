// SPDX-License-Identifier: Apache-2.0
// How fast the kernel sees a TCP connection deliver what is written to it.
#pragma once

#include "transport/data_endpoint.h"

namespace bps::transport::tcp {

MeasuredRate delivery_rate(int socket);

}  // namespace bps::transport::tcp
