// SPDX-License-Identifier: Apache-2.0
// Says how much each host sums, and why, as JSON: which links and servers are the limit. It is a pure function.
#pragma once

#include <string>

#include "van/membership.h"

namespace bps::node {

// Describes the weights of the group of all ranks.
std::string describe_placement(const van::Membership& members);

}  // namespace bps::node
