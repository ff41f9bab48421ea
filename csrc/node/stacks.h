// SPDX-License-Identifier: Apache-2.0
// Shows where the threads of this program are, as its own run time system tells it.
//
// Any thread may call these. Without a function that shows them the text is empty.
#pragma once

#include <functional>
#include <string>

namespace bps::node {

// Uses this function from now on, or none where it is empty. Waits for a call that is under way.
void show_stacks_by(std::function<std::string()> show);
std::string stacks();

}  // namespace bps::node
