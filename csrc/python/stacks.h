// SPDX-License-Identifier: Apache-2.0
// The stacks of a Python program, asked for by a thread that is not Python's.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace bps::python {

inline constexpr std::size_t kMostStackBytes = 64U << 10;

// By `text`, which another thread calls with Python's lock. When that takes too long, because a thread that runs
// foreign code keeps the lock, by a signal, whose handler writes to the start of `file` and needs no lock: it runs on
// the thread that asks. The file must have kMostStackBytes, and stay open.
std::function<std::string()> shows_stacks(std::function<std::string()> text, int signal, int file);
// Waits, without Python's lock, until no thread of that kind is left.
void await_stacks();

}  // namespace bps::python
