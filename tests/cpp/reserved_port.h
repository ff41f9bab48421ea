// SPDX-License-Identifier: Apache-2.0
// Reserves a port of this machine for a listener that a test starts later. Meanwhile the system gives the port neither
// to another connection nor to a listener that asks for any port.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>

#include "core/error.h"
#include "core/fd.h"

namespace bps {

class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;  // lets the listener have it, too, as this socket does not listen
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const where = reinterpret_cast<sockaddr*>(&address);
    socklen_t size = sizeof address;
    if (::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        ::bind(socket_.get(), where, size) != 0 || ::getsockname(socket_.get(), where, &size) != 0) {
      throw_errno("cannot reserve a port");
    }
    number_ = ntohs(address.sin_port);
  }
  std::uint16_t number() const { return number_; }

 private:
  Fd socket_;
  std::uint16_t number_ = 0;
};

}  // namespace bps
