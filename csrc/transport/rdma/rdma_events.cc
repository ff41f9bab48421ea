// SPDX-License-Identifier: Apache-2.0
// Takes note of what goes wrong: connections end, queue pairs fail, devices go.
#include <sys/epoll.h>

#include <string>
#include <utility>

#include "core/log.h"
#include "transport/rdma/device.h"
#include "transport/rdma/rdma_transport.h"

namespace bps::transport::rdma {
std::string in_words(ibv_wc_status status) {
  const std::string name = ::ibv_wc_status_str(status);
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return name +
             ": the peer acknowledges nothing; it has ended, or packets are lost (look at the link, the MTU, "
             "PFC and ECN; BPS_RDMA_TIMEOUT and BPS_RDMA_RETRY_CNT wait longer)";
    case IBV_WC_REM_ACCESS_ERR: return name + ": the peer has no memory registered at that address under that key";
    case IBV_WC_REM_INV_REQ_ERR: return name + ": the peer cannot take a message like this";
    case IBV_WC_LOC_PROT_ERR: return name + ": memory was unregistered, or freed, while it was being sent";
    case IBV_WC_RNR_RETRY_EXC_ERR: return name + ": the peer had no receive posted for too long";
    case IBV_WC_WR_FLUSH_ERR: return "the connection broke";
    default: return name;
  }
}

void RdmaTransport::watch() {
  loop_.watch(channel_->fd, EPOLLIN, [this](std::uint32_t) {
    note_cm_events();
    poll();
  });
  loop_.watch(context_->channel()->fd, EPOLLIN, [this](std::uint32_t) { context_->take_completion_events(); });
  loop_.watch(context_->device()->async_fd, EPOLLIN, [this](std::uint32_t) { on_device_events(); });
  device_check_ = loop_.every(kDeviceCheck_s, [this] {
    if (context_ && is_removed(*context_->device())) lose_device("the RDMA device was removed");
  });
}

// Only notes what ended. The poll that follows delivers what arrived before the end, and then tells.
void RdmaTransport::note_cm_events() {
  CmEvent event;
  while (next_event(channel_.get(), event)) {
    switch (event.type) {
      case RDMA_CM_EVENT_ESTABLISHED:
      case RDMA_CM_EVENT_ADDR_CHANGE: break;  // queue pairs stay where they are when an address moves
      case RDMA_CM_EVENT_DEVICE_REMOVAL: removal_ = in_words(event); break;
      default:
        if (auto* endpoint = static_cast<RcEndpoint*>(event.id->context)) endpoint->lose(in_words(event));
    }
  }
}

void RdmaTransport::on_device_events() {
  ibv_async_event event{};
  while (context_ && ::ibv_get_async_event(context_->device(), &event) == 0) {
    ::ibv_ack_async_event(&event);  // before anything is destroyed, which waits for it
    const std::string name = ::ibv_event_type_str(event.event_type);
    switch (event.event_type) {
      case IBV_EVENT_QP_FATAL:
      case IBV_EVENT_QP_REQ_ERR:
      case IBV_EVENT_QP_ACCESS_ERR:
      case IBV_EVENT_PATH_MIG_ERR:
        if (RcEndpoint* endpoint = endpoints_.by_queue_pair(event.element.qp)) {
          poll();
          endpoint = endpoints_.by_queue_pair(event.element.qp);
          if (endpoint != nullptr) endpoint->lose(name);
        }
        break;
      case IBV_EVENT_COMM_EST:  // bytes were faster than the connection manager's last message
        if (RcEndpoint* endpoint = endpoints_.by_queue_pair(event.element.qp)) {
          ::rdma_notify(endpoint->connection.id(), IBV_EVENT_COMM_EST);
        }
        break;
      case IBV_EVENT_PORT_ERR:
        if (event.element.port_num != static_cast<int>(context_->rail().port)) break;
        // The port may come back, and the queue pairs will try that long, unless there is another path. When they give
        // up, this is why.
        port_trouble_ = name;
        state_.port_down = true;
        log_warning(context_->rail().device + " port " + std::to_string(event.element.port_num) + ": " + name);
        break;
      case IBV_EVENT_PORT_ACTIVE:
        if (event.element.port_num != static_cast<int>(context_->rail().port)) break;
        port_trouble_.clear();
        state_.port_down = false;
        break;
      case IBV_EVENT_SRQ_LIMIT_REACHED: context_->shared_receives.note_shortage(); break;
      case IBV_EVENT_DEVICE_FATAL:
      case IBV_EVENT_CQ_ERR:
      case IBV_EVENT_SRQ_ERR: return lose_device(context_->rail().device + ": " + name);
      default: log_info(context_->rail().device + ": " + name);
    }
  }
}

int RdmaTransport::tell_losses() {
  return endpoints_.tell_losses(port_trouble_.empty() ? "" : " (" + port_trouble_ + ")");
}

// Gives everything back, since the kernel may wait for that. What is left of the transport refuses to work.
void RdmaTransport::lose_device(const std::string& why) {
  log_warning(why);
  endpoints_.lose_all(why);
  while (!state_.in_turn.empty()) endpoints_.begin_turn();  // nothing arrives any more
  const std::string device = context_->rail().device;
  tell_losses();
  let_go_of_device();
}

void RdmaTransport::let_go_of_device() {
  for (const int fd : {channel_->fd, context_->channel()->fd, context_->device()->async_fd}) loop_.forget(fd);
  endpoints_.drop_all();
  registrations_->drop_all();
  if (is_removed(*context_->device()) && anchor_->verbs != nullptr) let_go(*anchor_->verbs);
  anchor_.reset();
  std::shared_ptr<Context> ended;  // closes the device without the lock
  const std::lock_guard lock(context_mutex_);
  ended.swap(context_);
}

}  // namespace bps::transport::rdma
