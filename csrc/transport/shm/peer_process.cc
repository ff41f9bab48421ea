// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/peer_process.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <csignal>

#include "core/system_calls.h"

namespace bps::transport::shm {
namespace {

int number_of_peer(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return 0;
  return credentials.pid;
}

// Returns an empty handle where this process may not end the other one.
Fd open_process(int number) {
  Fd process(number > 0 && number != ::getpid() ? bps::pidfd_open(number) : -1);
  constexpr int kOnlyAsk = 0;
  if (process && bps::pidfd_send_signal(process.get(), kOnlyAsk) != 0) process.reset();
  return process;
}

}  // namespace

PeerProcess::PeerProcess(int socket)
    : number_(number_of_peer(socket)), is_this_(number_ == ::getpid()), handle_(open_process(number_)) {}

bool PeerProcess::has_ended() const {
  pollfd ended{handle_.get(), POLLIN, 0};
  return handle_ && ::poll(&ended, 1, 0) == 1;
}

void PeerProcess::end() const {
  (void)bps::pidfd_send_signal(handle_.get(), SIGKILL);  // fails where it has ended already
}

bool PeerProcess::has_at(std::uint64_t address, const Probe& probe) const {
  // Without a handle nobody would notice that another process has the number.
  if (number_ == 0 || (!handle_ && !is_this())) return false;
  Probe found{};
  iovec here{found.data(), found.size()};
  iovec there{reinterpret_cast<void*>(address), found.size()};
  const auto size = static_cast<ssize_t>(found.size());
  if (::process_vm_readv(number_, &here, 1, &there, 1, 0) != size || found != probe) return false;
  return ::process_vm_writev(number_, &here, 1, &there, 1, 0) == size;  // writes the same: one of the two may be denied
}

// Copies by the number of the process, which another process may have once the peer has ended and its parent has waited
// for it. The handle of the process tells whether it has ended. If the peer has not ended when its memory has been
// read, it was the one that was read. A write is not undone, so the peer is asked before. A write reaches another
// process only if the peer ends, its parent waits, the kernel's numbers make a whole turn (at least 32768 new
// processes), and a process of this user has memory at that address, all between two system calls in a row. No system
// call writes by a handle; /proc/PID/mem, which stays with its memory, copies each page twice.
Status PeerProcess::copy(bool read, std::byte* here, std::uint64_t there, std::uint64_t length) const {
  const auto is_gone = [this] { return !is_this() && (!handle_ || has_ended()); };
  while (length > 0) {
    if (!read && is_gone()) return Status::kPeerLost;
    iovec local{here, length};
    iovec remote{reinterpret_cast<void*>(there), length};
    const ssize_t done = read ? ::process_vm_readv(number_, &local, 1, &remote, 1, 0)
                              : ::process_vm_writev(number_, &local, 1, &remote, 1, 0);
    if (done <= 0) return Status::kPeerLost;
    here += done;
    there += static_cast<std::uint64_t>(done);
    length -= static_cast<std::uint64_t>(done);
  }
  return read && is_gone() ? Status::kPeerLost : Status::kOk;
}

}  // namespace bps::transport::shm
