// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/context.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "transport/rdma/device.h"

namespace bps::transport::rdma {
namespace {

constexpr unsigned kForPeers = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
constexpr std::uint32_t kFirstSendQueue = 2048;  // both grow with the queue pairs
constexpr std::uint32_t kFirstReceiveQueue = kSharedReceives + 1024;

[[noreturn]] void fail_registration(std::size_t size, const Rail& rail) {
  const int error = errno;
  const std::string what = "cannot register " + std::to_string(size) + " bytes with " + rail.device + ": ";
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  if ((error == ENOMEM || error == EAGAIN) && limit.rlim_cur != RLIM_INFINITY) {
    throw Error(
        ErrorCode::kTransport, what + "the limit on locked memory is " + std::to_string(limit.rlim_cur) + " bytes",
        "raise it: `ulimit -l unlimited`, `docker run --ulimit memlock=-1`, or LimitMEMLOCK=infinity in a unit");
  }
  throw Error(
      ErrorCode::kTransport, what + std::strerror(error),
      error == EFAULT ? "the memory is not mapped, or may not be written" : "look at the device by `bps doctor`");
}

// Returns the size of the largest completion queue of a device that has all that is needed, and throws for others.
std::uint32_t check_device(ibv_context* device, const Rail& rail) {
  ibv_device_attr attributes{};
  ibv_port_attr port{};
  if (::ibv_query_device(device, &attributes) != 0 ||
      ibv_query_port(device, static_cast<std::uint8_t>(rail.port), &port) != 0) {
    throw_errno("cannot query the capabilities of " + rail.device);
  }
  if (port.max_msg_sz < kLongestPiece) {
    throw Error(ErrorCode::kTransport,
                rail.device + " sends at most " + std::to_string(port.max_msg_sz) + " bytes at once",
                "use another device (BPS_RDMA_HCA), or BPS_TRANSPORT=tcp");
  }
  if (static_cast<std::uint32_t>(attributes.max_srq_wr) < kSharedReceives) {
    throw Error(ErrorCode::kTransport, rail.device + " has no shared receive queue of the depth needed",
                "use another device (BPS_RDMA_HCA), or BPS_TRANSPORT=tcp");
  }
  return static_cast<std::uint32_t>(attributes.max_cqe);
}

template <typename Object>
Object made(Object object, const char* what, const Rail& rail) {
  if (!object) fail_making(what, rail);
  return object;
}

}  // namespace

void fail_making(const char* what, const Rail& rail) {
  throw_errno(std::string("cannot make ") + what + " on " + rail.device,
              errno == ENOMEM ? "raise the limit on locked memory (ulimit -l)" : "look at the device by `bps doctor`");
}

Context::Context(const Rail& rail, const RdmaOptions& options)
    : rail_(rail),
      options_(options),
      device_(open_rdma_device(rail.device)),
      most_completions_(check_device(device_.get(), rail_)),
      pd_(made(Pd(::ibv_alloc_pd(device_.get())), "a protection domain", rail_)),
      channel_(made(CompChannel(::ibv_create_comp_channel(device_.get())), "a completion channel", rail_)),
      sent(rail_, device_.get(), channel_.get(), 0, kFirstSendQueue, most_completions_),
      received(rail_, device_.get(), channel_.get(), kSharedReceives, kFirstReceiveQueue, most_completions_),
      shared_receives(rail_, pd_.get()) {
  for (const int fd : {channel_->fd, device_->async_fd}) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

Mr Context::register_own(std::span<std::byte> bytes) {
  Mr region(ibv_reg_mr(pd_.get(), bytes.data(), bytes.size(), unsigned{IBV_ACCESS_LOCAL_WRITE}));
  if (!region) fail_registration(bytes.size(), rail_);
  return region;
}

Mr Context::register_for_peers(std::span<std::byte> bytes) {
  // Relaxed ordering is safe, because bytes are looked at only after the completion that announces them; it is asked
  // for where the library knows it, and may be ignored.
  Mr region(ibv_reg_mr(pd_.get(), bytes.data(), bytes.size(), kForPeers | IBV_ACCESS_RELAXED_ORDERING));
  if (!region && (errno == ENOSYS || errno == EINVAL || errno == EOPNOTSUPP)) {
    region.reset(ibv_reg_mr(pd_.get(), bytes.data(), bytes.size(), kForPeers));
  }
  if (!region) fail_registration(bytes.size(), rail_);
  return region;
}

// Does not ask for relaxed ordering: a device's kernels see these bytes by rules of their own.
Mr Context::register_for_peers(const ForeignMemory& memory) {
  const auto& [bytes, dma_buf] = memory;
  const auto address = reinterpret_cast<std::uint64_t>(bytes.data());
  Mr region(dma_buf < 0 ? ibv_reg_mr(pd_.get(), bytes.data(), bytes.size(), kForPeers)
                        : ibv_reg_dmabuf_mr(pd_.get(), 0, bytes.size(), address, dma_buf, int{kForPeers}));
  if (!region) fail_registration(bytes.size(), rail_);
  return region;
}

void Context::arm(bool sends) {
  received.arm();
  if (sends) sent.arm();
}

void Context::take_completion_events() {
  ibv_cq* cq = nullptr;
  void* unused = nullptr;
  // This asks no more often than it must: a question that finds nothing is a system call, too.
  while ((received.is_armed() || sent.is_armed()) && ::ibv_get_cq_event(channel_.get(), &cq, &unused) == 0) {
    (cq == sent.get() ? sent : received).take_event();
  }
}

}  // namespace bps::transport::rdma
