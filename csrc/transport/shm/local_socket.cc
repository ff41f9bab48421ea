// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/local_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/interrupt.h"
#include "core/limits.h"

namespace bps::transport::shm {
namespace {

constexpr double kPause_s = 0.005;  // no event tells that a shortage is over

}  // namespace

Status send_record(int socket, std::span<const std::byte> record, std::span<const int> fds) {
  iovec part{const_cast<std::byte*>(record.data()), record.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  // Records are far below the socket's buffer, which the kernel fills whole or not at all for messages this small.
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(record.size())) return Status::kOk;
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || is_shortage(errno))) return Status::kAgain;
  return Status::kPeerLost;
}

Status RecordReader::receive(int socket) {
  if (have_ == record_.size()) {
    have_ = 0;
    fds_.clear();
  }
  while (have_ < record_.size()) {
    iovec part{record_.data() + have_, record_.size() - have_};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))] = {};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const auto got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || is_shortage(errno))) return Status::kAgain;
    if (got <= 0) return Status::kPeerLost;
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        fds_.emplace_back(fd);
      }
    }
    if (fds_.size() > kMaxFds) return Status::kPeerLost;  // a peer that sends some with each byte
    have_ += static_cast<std::size_t>(got);
  }
  return Status::kOk;
}

Status send_record(int socket, std::span<const std::byte> record, std::span<const int> fds, const Deadline& deadline) {
  for (;;) {
    const Status status = send_record(socket, record, fds);
    if (status != Status::kAgain || deadline.passed()) return status;
    sleep_until(Deadline::after(std::min(kPause_s, deadline.left_ms() / 1e3)));
  }
}

Status RecordReader::receive(int socket, const Deadline& deadline) {
  for (;;) {
    const Status status = receive(socket);
    if (status != Status::kAgain) return status;
    pollfd wait{socket, POLLIN, 0};
    if (poll_until(wait, deadline) == 0) return Status::kAgain;
  }
}

bool is_closed(int socket) {
  pollfd state{socket, POLLRDHUP, 0};
  return ::poll(&state, 1, 0) == 1 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0;
}

}  // namespace bps::transport::shm
