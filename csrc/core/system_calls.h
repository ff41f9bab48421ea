// SPDX-License-Identifier: Apache-2.0
// Makes system calls that are younger than glibc 2.28, which wheels are built with (manylinux_2_28). It has no
// functions, and no numbers, for them. The numbers are the same on every architecture. A kernel that lacks a call sets
// ENOSYS. Any thread may call these; none throws.
#pragma once

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace bps {

constexpr long kPidfdSendSignal = 424;  // Linux 5.1
constexpr long kPidfdOpen = 434;        // Linux 5.3
constexpr long kEpollPwait2 = 441;      // Linux 5.11
#ifdef SYS_epoll_pwait2
static_assert(kPidfdSendSignal == SYS_pidfd_send_signal && kPidfdOpen == SYS_pidfd_open &&
              kEpollPwait2 == SYS_epoll_pwait2);
#endif

inline int epoll_pwait2(int epoll, epoll_event* events, int size, const timespec* timeout) {
  return static_cast<int>(::syscall(kEpollPwait2, epoll, events, size, timeout, nullptr, 0));
}

inline int pidfd_open(int pid) {
  return static_cast<int>(::syscall(kPidfdOpen, pid, 0));
}

inline int pidfd_send_signal(int process, int signal) {
  return static_cast<int>(::syscall(kPidfdSendSignal, process, signal, nullptr, 0));
}

}  // namespace bps
