// SPDX-License-Identifier: Apache-2.0
// The library stays usable in a process that the application forks.
//
// The child is not a member of its parent's jobs. Its copies of the parent's descriptors are closed at the fork (fd.h),
// so that a connection ends with the parent, and an address is free again. The parent's objects are still there, but
// without their threads: whoever holds one compares fork_count() with that of its construction, and neither uses nor
// destroys it when they differ. The child can make objects of its own.
#pragma once

#include <cstdint>
#include <mutex>

namespace bps {

// Counts the forks of this process and its ancestors since the library was loaded.
std::uint32_t fork_count();

// The child gets this mutex unlocked, and what it guards in order: fork() waits until no thread holds it. For mutexes
// that live for ever and under which no other mutex is taken. Call it once per mutex.
void hold_across_fork(std::mutex& mutex);

// Calls `action` in each child, before the parent's descriptors are closed. It may only do what signal handlers may,
// and rely on the mutexes above.
void after_fork_in_child(void (*action)());

// For Fd: a descriptor to close in children, from now on or no longer.
void close_in_children(int fd);
void keep_in_children(int fd);

}  // namespace bps
