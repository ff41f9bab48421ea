// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/rdma_control.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace bps::transport::rdma {

RdmaControl::RdmaControl(const Hello& made_by, TransportState& of, RcConnection by)
    : RdmaEndpoint(made_by, of, std::move(by)),
      buffers_(static_cast<std::byte*>(
          ::operator new((kControlReceives + kControlSends) * kControlBuffer, std::align_val_t{kControlBuffer}))),
      memory_(of.context.register_own({buffers_.get(), (kControlReceives + kControlSends) * kControlBuffer})) {
  for (std::uint32_t i = 0; i < kControlReceives; ++i) {
    if (!post_receive(i)) throw_errno("cannot post a receive buffer");
  }
}

Status RdmaControl::send(std::span<const std::byte> message) {
  if (is_lost() || !connection) return Status::kPeerLost;
  if (message.size() > kMaxMessage) return Status::kProtocol;
  state.counters.control_messages.add();
  state.counters.control_bytes.add(message.size());
  std::size_t offset = 0;
  if (!waiting_.empty() || !transmit(message, offset)) {
    waiting_.push_back({Bytes(message.begin(), message.end()), offset});
  }
  return Status::kOk;
}

void RdmaControl::probe() {
  if (is_lost() || !connection || posted_ != completed_) return;
  post_send({});
}

bool RdmaControl::transmit(std::span<const std::byte> message, std::size_t& offset) {
  do {
    if (is_lost()) return true;
    if (posted_ - completed_ == kControlSends) return false;
    const std::size_t size = std::min(kRoom, message.size() - offset);
    const Fragment fragment{static_cast<std::uint32_t>(message.size()), static_cast<std::uint32_t>(offset)};
    std::byte* buffer = send_buffer(posted_ % kControlSends);
    copy_bytes(codec::bytes_of(fragment), buffer);
    if (size > 0) std::memcpy(buffer + sizeof fragment, message.data() + offset, size);
    post_send({buffer, sizeof fragment + size});
    offset += size;
  } while (offset < message.size());
  return true;
}

void RdmaControl::post_send(std::span<const std::byte> piece) {
  ibv_sge bytes{reinterpret_cast<std::uint64_t>(piece.data()), static_cast<std::uint32_t>(piece.size()), memory_->lkey};
  ibv_send_wr request{};
  request.wr_id = WrId(WrId::Kind::kSend, posted_).value();
  request.sg_list = &bytes;
  request.num_sge = piece.empty() ? 0 : 1;
  request.opcode = IBV_WR_SEND;
  request.send_flags = IBV_SEND_SIGNALED;
  if (bytes.length <= connection.queue_pair().inline_limit()) request.send_flags |= IBV_SEND_INLINE;
  ibv_send_wr* bad = nullptr;
  if (const int error = ibv_post_send(connection.queue_pair().get(), &request, &bad); error != 0) {
    return lose(std::string("cannot post a message: ") + std::strerror(error));
  }
  ++posted_;
}

void RdmaControl::on_sent(std::uint64_t number) {
  completed_ = std::max(completed_, number + 1);
  while (!waiting_.empty() && transmit(waiting_.front().message, waiting_.front().offset)) waiting_.pop_front();
}

bool RdmaControl::post_receive(std::uint64_t buffer) {
  ibv_sge room{reinterpret_cast<std::uint64_t>(receive_buffer(buffer)), kControlBuffer, memory_->lkey};
  ibv_recv_wr request{};
  request.wr_id = WrId(WrId::Kind::kControlReceive, buffer).value();
  request.sg_list = &room;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(connection.queue_pair().get(), &request, &bad) == 0;
}

void RdmaControl::on_arrived(const ibv_wc& completion) {
  const std::uint64_t buffer = WrId(completion.wr_id).number();
  if (completion.opcode != IBV_WC_RECV || buffer >= kControlReceives || completion.byte_len > kControlBuffer) {
    return lose("it broke the protocol of control messages");
  }
  if (!budget_) {
    budget_.emplace();
    state.in_turn.push_back(this);
  }
  if (is_spent_) return held_.push_back({buffer, completion.byte_len});
  handle({buffer, completion.byte_len});
}

void RdmaControl::handle(const Arrived& piece) {
  if (!take({receive_buffer(piece.buffer), piece.bytes})) return lose("it broke the protocol of control messages");
  is_spent_ = !budget_->spend(piece.bytes);
  if (connection && !post_receive(piece.buffer)) lose("cannot post a receive buffer");
}

int RdmaControl::begin_turn() {
  budget_.reset();
  is_spent_ = false;
  if (held_.empty()) return 0;
  budget_.emplace();
  state.in_turn.push_back(this);
  int handled = 0;
  while (!held_.empty() && !is_spent_ && !is_loss_told()) {
    const Arrived piece = held_.front();
    held_.pop_front();
    handle(piece);
    ++handled;
  }
  return handled + static_cast<int>(held_.size());
}

// Checks each piece against the pieces before it.
bool RdmaControl::take(std::span<const std::byte> piece) {
  if (piece.empty()) return true;  // a probe
  Fragment fragment{};
  if (piece.size() < sizeof fragment) return false;
  copy_bytes(piece.first(sizeof fragment), codec::writable_bytes_of(fragment).data());
  const auto body = piece.subspan(sizeof fragment);
  if (!codec::accepts(fragment) || fragment.offset != partial_.size() ||
      body.size() > fragment.total - fragment.offset || (body.empty() && fragment.total > 0)) {
    return false;
  }
  if (fragment.offset == 0) {
    if (body.size() == fragment.total) {
      sink->on_message(*this, body);
      return true;
    }
    expected_ = fragment.total;
  } else if (fragment.total != expected_) {
    return false;
  }
  partial_.insert(partial_.end(), body.begin(), body.end());
  if (partial_.size() == expected_) {
    sink->on_message(*this, partial_);
    partial_.clear();
  }
  return true;
}

void RdmaControl::drop() {
  std::erase(state.in_turn, this);
  held_.clear();
  memory_.reset();
  waiting_.clear();
}

}  // namespace bps::transport::rdma
