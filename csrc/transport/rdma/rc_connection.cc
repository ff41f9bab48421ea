// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/rc_connection.h"

#include <cerrno>
#include <cstring>

#include "transport/rdma/capacity.h"

namespace bps::transport::rdma {
namespace {

constexpr std::uint8_t kRnrTimer = 12;  // 0.64 ms until a sender tries again for which there was no receive request

}  // namespace

RcConnection::RcConnection(std::shared_ptr<Context> context, CmId id, Plane plane)
    : context_(std::move(context)), plane_(plane), id_(std::move(id)), queue_pair_(context_, plane) {
  const Rail& rail = context_->rail();
  if (id_->verbs == nullptr || rail.device != id_->verbs->device->name) {
    throw Error(ErrorCode::kUnreachable,
                "the connection manager chose " +
                    std::string(id_->verbs == nullptr ? "no device" : id_->verbs->device->name) + " instead of " +
                    rail.device,
                "set BPS_NODE_HOST to the address of the network interface that belongs to " + rail.device);
  }
  advance(IBV_QPS_INIT);
}

// Takes the path and the peer's numbers from the connection manager, and the rest from the user and the transport.
void RcConnection::advance(ibv_qp_state state) {
  const RdmaOptions& options = context_->options();
  ibv_qp_attr attributes{};
  int mask = 0;
  attributes.qp_state = state;
  if (::rdma_init_qp_attr(id_.get(), &attributes, &mask) != 0) throw_errno("cannot connect a queue pair");
  switch (state) {
    case IBV_QPS_INIT:
      // On the control plane nobody writes into anything.
      attributes.qp_access_flags = plane_ == Plane::kData ? IBV_ACCESS_REMOTE_WRITE : 0;
      if (options.pkey_index) attributes.pkey_index = static_cast<std::uint16_t>(*options.pkey_index);
      break;
    case IBV_QPS_RTR:
      attributes.min_rnr_timer = kRnrTimer;
      if (options.service_level) attributes.ah_attr.sl = static_cast<std::uint8_t>(*options.service_level);
      if (attributes.ah_attr.is_global != 0) {
        if (options.traffic_class) {
          attributes.ah_attr.grh.traffic_class = static_cast<std::uint8_t>(*options.traffic_class);
        }
        if (context_->rail().gid_forced) {
          attributes.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(context_->rail().gid_index);
        }
      }
      break;
    case IBV_QPS_RTS:
      attributes.timeout = static_cast<std::uint8_t>(options.timeout);
      attributes.retry_cnt = static_cast<std::uint8_t>(options.retry_count);
      attributes.rnr_retry = kForeverRetry;
      break;
    default: break;
  }
  if (const int error = ::ibv_modify_qp(queue_pair_.get(), &attributes, mask); error != 0) {
    errno = error;
    throw_errno("cannot connect a queue pair of " + context_->rail().device, "`bps doctor` looks at the device");
  }
}

void RcConnection::request(const RequestData& data) {
  rdma_conn_param parameters{};
  parameters.private_data = data.data();
  parameters.private_data_len = static_cast<std::uint8_t>(data.size());
  parameters.flow_control = 1;
  parameters.retry_count = static_cast<std::uint8_t>(context_->options().retry_count);
  parameters.rnr_retry_count = kForeverRetry;
  parameters.srq = plane_ == Plane::kData ? 1 : 0;
  parameters.qp_num = queue_pair_.number();
  if (::rdma_connect(id_.get(), &parameters) != 0) throw_errno("cannot send a connection request");
}

void RcConnection::accept(const ReplyData& reply) {
  advance(IBV_QPS_RTR);
  advance(IBV_QPS_RTS);
  rdma_conn_param parameters{};
  parameters.private_data = reply.data();
  parameters.private_data_len = static_cast<std::uint8_t>(reply.size());
  parameters.flow_control = 1;
  parameters.rnr_retry_count = kForeverRetry;
  parameters.srq = plane_ == Plane::kData ? 1 : 0;
  parameters.qp_num = queue_pair_.number();
  if (::rdma_accept(id_.get(), &parameters) != 0) throw_errno("cannot accept a connection");
}

void RcConnection::establish(rdma_event_channel* channel) {
  if (::rdma_migrate_id(id_.get(), channel) != 0) throw_errno("cannot take over a connection");
  caller_channel.reset();
  advance(IBV_QPS_RTR);
  advance(IBV_QPS_RTS);
  if (::rdma_establish(id_.get()) != 0) throw_errno("cannot confirm a connection");
}

void RcConnection::break_off() {
  queue_pair_.reset();
  id_.reset();  // tells the other side
  context_.reset();
}

}  // namespace bps::transport::rdma
