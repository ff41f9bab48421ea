// SPDX-License-Identifier: Apache-2.0
// Keeps the library usable in a process that the application forks.
//
// The child is not a member of its parent's jobs. Its copies of the parent's descriptors are closed at the fork (fd.h),
// so that a connection ends with the parent, and an address is free again. The parent's objects are still there, but
// without their threads. A holder of one compares fork_count() with that of its construction, and neither uses nor
// destroys it when they differ. The child can make objects of its own.
#pragma once

#include <cstdint>
#include <mutex>

namespace bps {

// Returns how often this process and its ancestors forked since the library was loaded.
std::uint32_t fork_count();

// Gives the child this mutex unlocked, and what it guards in order: fork() waits until no thread holds it. It is for
// mutexes that live for ever and under which no other mutex is taken. Call it once per mutex.
void hold_across_fork(std::mutex& mutex);

// Calls `action` in each child, before the parent's descriptors are closed. It may only do what signal handlers may,
// and rely on the mutexes above.
void after_fork_in_child(void (*action)());

// Tells that a descriptor is to be closed in children, from now on or no longer. Fd calls these.
void close_in_children(int fd);
void keep_in_children(int fd);

}  // namespace bps
