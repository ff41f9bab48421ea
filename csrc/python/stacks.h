// SPDX-License-Identifier: Apache-2.0
// Shows the stacks of a Python program to a thread that is not Python's.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace bps::python {

inline constexpr std::size_t kMostStackBytes = 64U << 10;

// Returns a function that asks `text`, which another thread calls with Python's lock. That may take too long, because a
// thread that runs foreign code keeps the lock. Then `signal` is raised on the thread that asks, and its handler writes
// to the start of `file`, without a lock. The file must have kMostStackBytes, and stay open.
std::function<std::string()> shows_stacks(std::function<std::string()> text, int signal, int file);
// Waits, without Python's lock, until no thread of that kind is left.
void await_stacks();

}  // namespace bps::python
