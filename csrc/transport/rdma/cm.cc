// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/cm.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>

#include <cerrno>
#include <cstring>

namespace bps::transport::rdma {

CmChannel make_cm_channel() {
  CmChannel channel(::rdma_create_event_channel());
  if (!channel) {
    throw Error(ErrorCode::kUnreachable, std::string("cannot use the RDMA connection manager: ") + std::strerror(errno),
                "load its kernel module (modprobe rdma_ucm) and give access to /dev/infiniband/rdma_cm");
  }
  ::fcntl(channel->fd, F_SETFL, ::fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
  return channel;
}

CmId make_cm_id(rdma_event_channel* channel) {
  rdma_cm_id* id = nullptr;
  if (::rdma_create_id(channel, &id, nullptr, RDMA_PS_TCP) != 0) throw_errno("cannot make an RDMA connection");
  return CmId(id);
}

bool next_event(rdma_event_channel* channel, CmEvent& event) {
  rdma_cm_event* raw = nullptr;
  if (::rdma_get_cm_event(channel, &raw) != 0) return false;
  event.type = raw->event;
  event.status = raw->status;
  event.id = raw->id;
  event.listener = raw->listen_id;
  const auto* data = static_cast<const std::byte*>(raw->param.conn.private_data);
  event.private_data.assign(data, data + (data == nullptr ? 0 : raw->param.conn.private_data_len));
  ::rdma_ack_cm_event(raw);
  return true;
}

std::string in_words(const CmEvent& event) {
  const auto with_errno = [&](const char* what) {
    return event.status == 0 ? what : what + std::string(": ") + std::strerror(std::abs(event.status));
  };
  switch (event.type) {
    case RDMA_CM_EVENT_ADDR_ERROR: return with_errno("the address cannot be resolved");
    case RDMA_CM_EVENT_ROUTE_ERROR: return with_errno("there is no route");
    case RDMA_CM_EVENT_CONNECT_ERROR: return with_errno("connecting failed");
    case RDMA_CM_EVENT_UNREACHABLE: return with_errno("no answer");
    case RDMA_CM_EVENT_REJECTED:
      // 8 means no such service. 28 is a refusal by the program that listens, the rest by the device or the kernel.
      return event.status == 8    ? "nobody listens there"
             : event.status == 28 ? "refused"
                                  : "refused by the other side's device, reason " + std::to_string(event.status);
    case RDMA_CM_EVENT_DISCONNECTED: return "the peer closed the connection, or ended";
    case RDMA_CM_EVENT_DEVICE_REMOVAL: return "the RDMA device was removed";
    case RDMA_CM_EVENT_ADDR_CHANGE: return "the address of the network interface changed";
    case RDMA_CM_EVENT_TIMEWAIT_EXIT: return "the connection is over";
    default: return ::rdma_event_str(event.type);
  }
}

CmAddress::CmAddress(const std::string& host, std::uint16_t port, const std::string& interface) {
  auto* four = reinterpret_cast<sockaddr_in*>(&storage_);
  auto* six = reinterpret_cast<sockaddr_in6*>(&storage_);
  if (::inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    return;
  }
  storage_ = {};
  if (::inet_pton(AF_INET6, host.c_str(), &six->sin6_addr) != 1) {
    throw Error(ErrorCode::kTransport, "'" + host + "' is no address of an RDMA network",
                "install the same bps_rdma version everywhere");
  }
  six->sin6_family = AF_INET6;
  six->sin6_port = htons(port);
  if (IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr)) six->sin6_scope_id = ::if_nametoindex(interface.c_str());
}

}  // namespace bps::transport::rdma
