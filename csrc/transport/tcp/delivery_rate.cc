// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/delivery_rate.h"

#include <linux/tcp.h>  // the C library's header lacks the rate, and cannot be included beside this one
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace bps::transport::tcp {

MeasuredRate delivery_rate(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  if (size < offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate) return {};  // Linux before 4.9
  return {info.tcpi_delivery_rate, info.tcpi_delivery_rate_app_limited != 0};
}

Carried carried_by(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  if (size < offsetof(tcp_info, tcpi_busy_time) + sizeof info.tcpi_busy_time) return {};  // Linux before 4.10
  return {info.tcpi_bytes_acked, info.tcpi_busy_time};
}

}  // namespace bps::transport::tcp
