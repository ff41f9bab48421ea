#include "transport/rdma/context.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "transport/rdma/device.h"
#include "transport/rdma/wire.h"

namespace bps::transport::rdma {
namespace {

constexpr std::uint32_t kFirstSendQueue = 2048;  // both grow with the queue pairs
constexpr std::uint32_t kFirstReceiveQueue = kSharedReceives + 1024;
constexpr std::uint32_t kInlineWish = 256;  // a header and a small payload travel within the request
constexpr unsigned kAckBatch = 64;          // acknowledging takes a lock

[[noreturn]] void fail_making(const char* what, const Rail& rail) {
  throw_errno(std::string("cannot make ") + what + " on " + rail.device,
              errno == ENOMEM ? "raise the limit on locked memory (ulimit -l)" : "`bps doctor` looks at the device");
}

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
  throw Error(ErrorCode::kTransport, what + std::strerror(error),
              error == EFAULT ? "the memory is not there, or may not be written" : "`bps doctor` looks at the device");
}

std::uint32_t sends_of(Plane plane) {
  return plane == Plane::kData ? kDataWindow : kControlSends;
}
std::uint32_t receives_of(Plane plane) {
  return plane == Plane::kData ? 0 : kControlReceives;
}

}  // namespace

Context::Context(const Rail& rail, const RdmaOptions& options)
    : rail_(rail), options_(options), device_(open_rdma_device(rail.device)) {
  ibv_device_attr device{};
  ibv_port_attr port{};
  if (::ibv_query_device(device_.get(), &device) != 0 ||
      ibv_query_port(device_.get(), static_cast<std::uint8_t>(rail.port), &port) != 0) {
    throw_errno("cannot ask " + rail.device + " what it can do");
  }
  message_limit_ = port.max_msg_sz;
  if (message_limit_ < kSmallestMessageLimit) {
    throw Error(ErrorCode::kTransport, rail.device + " sends no more than " + std::to_string(message_limit_) + " bytes",
                "use another device (BPS_RDMA_HCA), or BPS_TRANSPORT=tcp");
  }
  if (static_cast<std::uint32_t>(device.max_srq_wr) < kSharedReceives) {
    throw Error(ErrorCode::kTransport, rail.device + " has no shared receive queue of the depth needed",
                "use another device (BPS_RDMA_HCA), or BPS_TRANSPORT=tcp");
  }
  const auto most = static_cast<std::uint32_t>(device.max_cqe);
  pd_.reset(::ibv_alloc_pd(device_.get()));
  if (!pd_) fail_making("a protection domain", rail);
  completions_.reset(::ibv_create_comp_channel(device_.get()));
  if (!completions_) fail_making("a completion channel", rail);
  for (const int fd : {completions_->fd, device_->async_fd}) ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  send_budget_ = QueueBudget(0, kFirstSendQueue, most);
  receive_budget_ = QueueBudget(kSharedReceives, kFirstReceiveQueue, most);
  send_cq_.reset(::ibv_create_cq(device_.get(), static_cast<int>(send_budget_.size()), nullptr, completions_.get(), 0));
  receive_cq_.reset(
      ::ibv_create_cq(device_.get(), static_cast<int>(receive_budget_.size()), nullptr, completions_.get(), 0));
  if (!send_cq_ || !receive_cq_) fail_making("a completion queue", rail);

  ibv_srq_init_attr shared{};
  shared.attr.max_wr = kSharedReceives;
  shared.attr.max_sge = 1;  // none is used; some drivers refuse 0
  srq_.reset(::ibv_create_srq(pd_.get(), &shared));
  if (!srq_) fail_making("a shared receive queue", rail);
  for (std::size_t i = 0; i < empty_receives_.size(); ++i) {
    empty_receives_[i].wr_id = WrId(WrId::Kind::kEmptyReceive, 0).value();
    empty_receives_[i].next = i + 1 < empty_receives_.size() ? &empty_receives_[i + 1] : nullptr;
  }
  refill();
}

Context::~Context() {
  if (send_events_ > 0) ::ibv_ack_cq_events(send_cq_.get(), send_events_);
  if (receive_events_ > 0) ::ibv_ack_cq_events(receive_cq_.get(), receive_events_);
}

Mr Context::register_own(std::span<std::byte> bytes) {
  Mr region(ibv_reg_mr(pd_.get(), bytes.data(), bytes.size(), unsigned{IBV_ACCESS_LOCAL_WRITE}));
  if (!region) fail_registration(bytes.size(), rail_);
  return region;
}

Mr Context::register_for_peers(std::span<std::byte> bytes) {
  // Relaxed ordering is safe, because bytes are looked at only after the completion that announces them; it is asked
  // for where the library knows it, and may be ignored.
  constexpr unsigned kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  Mr region(ibv_reg_mr(pd_.get(), bytes.data(), bytes.size(), kAccess | IBV_ACCESS_RELAXED_ORDERING));
  if (!region && (errno == ENOSYS || errno == EINVAL || errno == EOPNOTSUPP)) {
    region.reset(ibv_reg_mr(pd_.get(), bytes.data(), bytes.size(), kAccess));
  }
  if (!region) fail_registration(bytes.size(), rail_);
  return region;
}

void Context::repost() {
  while (missing_receives_ >= kRepostBatch) {
    ibv_recv_wr* bad = nullptr;
    // Full: more were there than we thought, which is as good.
    if (ibv_post_srq_recv(srq_.get(), empty_receives_.data(), &bad) != 0) {
      missing_receives_ = 0;
      return;
    }
    missing_receives_ -= kRepostBatch;
  }
}

// Only while the completion queue is known to be empty: it then holds whatever the full queue can bring.
void Context::refill() {
  shortage_ = false;
  missing_receives_ = kSharedReceives;
  repost();
  // The device says once when no more than this many are left. Not every device can, and none has to.
  ibv_srq_attr low{};
  low.srq_limit = kSharedReceives / 4;
  ::ibv_modify_srq(srq_.get(), &low, IBV_SRQ_LIMIT);
}

void Context::arm(bool sends) {
  if (!receive_armed_) receive_armed_ = ibv_req_notify_cq(receive_cq_.get(), 0) == 0;
  if (sends && !send_armed_) send_armed_ = ibv_req_notify_cq(send_cq_.get(), 0) == 0;
}

void Context::take_completion_events() {
  ibv_cq* cq = nullptr;
  void* user = nullptr;
  // No more than can be there: the question that finds nothing is a system call, too.
  while ((receive_armed_ || send_armed_) && ::ibv_get_cq_event(completions_.get(), &cq, &user) == 0) {
    const bool sent = cq == send_cq_.get();
    (sent ? send_armed_ : receive_armed_) = false;
    unsigned& events = sent ? send_events_ : receive_events_;
    if (++events < kAckBatch) continue;
    ::ibv_ack_cq_events(cq, events);
    events = 0;
  }
}

// ---- Queue pairs

Qp Context::make_qp(Plane plane, std::uint32_t& inline_limit) {
  const std::lock_guard lock(set_up_);
  const auto sends = send_budget_.reserve(sends_of(plane));
  const auto receives = receive_budget_.reserve(receives_of(plane));
  if (!sends || !receives) {
    if (sends) send_budget_.release(sends_of(plane));
    if (receives) receive_budget_.release(receives_of(plane));
    throw Error(ErrorCode::kTransport,
                rail_.device + " has completion queues of " + std::to_string(send_budget_.limit()) +
                    " entries at most, which the connections of this loop have used up",
                "use more server loops (BYTEPS_SERVER_ENGINE_THREAD), fewer BPS_RDMA_QPS, or another device");
  }
  for (const auto& [cq, size] : {std::pair{send_cq_.get(), *sends}, std::pair{receive_cq_.get(), *receives}}) {
    if (static_cast<std::uint32_t>(cq->cqe) >= size) continue;
    if (const int error = ::ibv_resize_cq(cq, static_cast<int>(size)); error != 0) {
      send_budget_.release(sends_of(plane));
      receive_budget_.release(receives_of(plane));
      errno = error;
      fail_making("a larger completion queue", rail_);
    }
  }
  ibv_qp_init_attr wanted{};
  wanted.send_cq = send_cq_.get();
  wanted.recv_cq = receive_cq_.get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = sends_of(plane);
  wanted.cap.max_send_sge = 2;
  if (plane == Plane::kData) {
    wanted.srq = srq_.get();
  } else {
    wanted.cap.max_recv_wr = receives_of(plane);
    wanted.cap.max_recv_sge = 1;
  }
  Qp made;
  for (const std::uint32_t limit : {kInlineWish, 64U, 0U}) {
    wanted.cap.max_inline_data = limit;
    ibv_qp_init_attr attempt = wanted;  // the driver writes what it gives into it
    made.reset(::ibv_create_qp(pd_.get(), &attempt));
    inline_limit = attempt.cap.max_inline_data;
    if (made || errno != EINVAL) break;
  }
  if (!made) {
    send_budget_.release(sends_of(plane));
    receive_budget_.release(receives_of(plane));
    fail_making("a queue pair", rail_);
  }
  return made;
}

void Context::give_back(Plane plane) {
  const std::lock_guard lock(set_up_);
  returned_sends_ += sends_of(plane);
  returned_receives_ += receives_of(plane);
  has_returns_.store(true, std::memory_order_relaxed);
}

void Context::take_returns() {
  const std::lock_guard lock(set_up_);
  send_budget_.release(std::exchange(returned_sends_, 0));
  receive_budget_.release(std::exchange(returned_receives_, 0));
  has_returns_.store(false, std::memory_order_relaxed);
}

QueuePair::QueuePair(std::shared_ptr<Context> context, Plane plane)
    : context_(std::move(context)), plane_(plane), qp_(context_->make_qp(plane, inline_limit_)) {}

QueuePair& QueuePair::operator=(QueuePair&& other) noexcept {
  reset();
  context_ = std::move(other.context_);
  plane_ = other.plane_;
  inline_limit_ = other.inline_limit_;
  qp_ = std::move(other.qp_);
  return *this;
}

void QueuePair::reset() {
  if (!qp_) return;
  qp_.reset();
  context_->give_back(plane_);
  context_.reset();
}

}  // namespace bps::transport::rdma
