// SPDX-License-Identifier: Apache-2.0
// Finds the limit of the system that stands behind an error, its value, and how to raise it.
//
// Any thread may call these. They cost system calls and reads of /proc and /sys: not for the data path.
#pragma once

#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>

namespace bps {

struct LimitReached {
  std::string what;  // "the limit on open files is 1024 (RLIMIT_NOFILE)"
  std::string hint;  // how to raise it
};

// Returns the limit behind an errno of a system call, or nothing where no limit of this process explains it.
std::optional<LimitReached> limit_behind(int error);

// Returns true when an errno of a socket says that the system is short of something at the moment, or that this user
// has as many files on the way as the limit allows. Nothing is wrong with the peer, and the call may succeed later.
inline bool is_shortage(int error) {
  return error == ENOBUFS || error == ENOMEM || error == ETOOMANYREFS;
}

// Throws kTransport when `bytes` more cannot fit into memory_limit(). The kernel promises such memory all the same, and
// kills a process when it is touched. Less than 1 MiB is not checked.
void check_memory(std::uint64_t bytes, const std::string& what_for);

// Returns the memory that this process may use: that of its cgroup, or of the machine.
std::uint64_t memory_limit();

// Throws kTransport, because the system refused a thread with this errno.
[[noreturn]] void throw_no_thread(int error);

}  // namespace bps
