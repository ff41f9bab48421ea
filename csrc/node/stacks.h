// SPDX-License-Identifier: Apache-2.0
// Shows where the threads of this program are, as its own run time system tells it.
//
// Threading: any thread. Errors: without somebody who shows them there is no text.
#pragma once

#include <functional>
#include <string>

namespace bps::node {

// Uses this from now on, until it is called with nothing. Waits for a call that is under way.
void show_stacks_by(std::function<std::string()> show);
std::string stacks();

}  // namespace bps::node
