// SPDX-License-Identifier: Apache-2.0
// Contains the hot part of rdma: writes go out, completions come in.
#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/rdma/rdma_data.h"
#include "transport/rdma/rdma_transport.h"
#include "transport/rdma/wire.h"

namespace bps::transport::rdma {
namespace {

constexpr int kMostBatches = 8;  // batches of completions per look, so that no other part of the loop starves

}  // namespace

std::size_t RdmaData::write(std::span<const WriteOp> ops) {
  if (is_lost() || !connection) return 0;
  const std::uint64_t first = posted_;
  std::size_t accepted = 0;
  while (accepted < ops.size() && ops[accepted].fits() && build(ops[accepted])) ++accepted;
  wants_room_ = accepted < ops.size();
  if (accepted > 0) ring(first);
  if (accepted < ops.size() && !ops[accepted].fits()) lose(kNoRoom);
  return accepted;
}

// Makes the requests of one write ready. Returns false when the window has no room for them.
bool RdmaData::build(const WriteOp& op) {
  const std::uint64_t total = op.total();
  const std::uint64_t count = pieces_of(total);
  if (posted_ - completed_ + count > kDataWindow) return false;
  const auto* source = static_cast<const RdmaRegion*>(op.source);
  std::uint64_t offset = 0;  // counts in header and payload together
  const std::byte* next = op.length > 0 ? source->bytes().data() + op.source_offset : nullptr;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::size_t place = posted_ % kDataWindow;
    ibv_send_wr& request = requests_[place];
    auto& pieces = pieces_[place];
    const std::uint64_t size = std::min(kLongestPiece, total - offset);
    std::uint64_t payload = size;
    std::size_t used = 0;
    if (i == 0 && !op.header.empty()) {
      std::byte* header = (*headers_)[place].bytes.data();
      std::memcpy(header, op.header.data(), op.header.size());
      pieces[used++] = {reinterpret_cast<std::uint64_t>(header), static_cast<std::uint32_t>(op.header.size()),
                        headers_memory_->lkey};
      payload -= op.header.size();
    }
    if (payload > 0) {
      pieces[used++] = {reinterpret_cast<std::uint64_t>(next), static_cast<std::uint32_t>(payload),
                        source->local_key(state.rail)};
      next += payload;
    }
    const bool last = i + 1 == count;
    request.wr_id = WrId(WrId::Kind::kSend, posted_).value();
    request.next = &requests_[(posted_ + 1) % kDataWindow];
    request.sg_list = pieces.data();
    request.num_sge = static_cast<int>(used);
    request.opcode = last ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
    request.imm_data = to_wire(op.immediate);
    // The processor reads what is sent inline, which it cannot where the memory is another device's.
    const bool is_readable = payload == 0 || !source->is_foreign();
    const bool is_inline = is_readable && size <= connection.queue_pair().inline_limit();
    request.send_flags = is_inline ? unsigned{IBV_SEND_INLINE} : 0U;
    request.wr.rdma.remote_addr = op.target.address + offset;
    request.wr.rdma.rkey = static_cast<std::uint32_t>(op.target.key);
    ++posted_;
    if (posted_ - signalled_ >= kSignalEvery) {
      request.send_flags |= IBV_SEND_SIGNALED;
      signalled_ = posted_;
    }
    Pending& pending = pending_[place];
    pending = {last ? op.token : kNoToken, payload > 0 ? source->registration(state.rail) : nullptr};
    if (pending.source != nullptr) ++pending.source->users;
    if (pending.token != kNoToken) ++tokens_;
    offset += size;
  }
  state.counters.data_writes.add();
  state.counters.data_bytes.add(op.length);
  return true;
}

// Posts the requests from `first` on, by one doorbell.
void RdmaData::ring(std::uint64_t first) {
  ibv_send_wr& last = requests_[(posted_ - 1) % kDataWindow];
  last.next = nullptr;
  last.send_flags |= IBV_SEND_SIGNALED;
  signalled_ = posted_;
  ibv_send_wr* bad = nullptr;
  const int error = ibv_post_send(connection.queue_pair().get(), &requests_[first % kDataWindow], &bad);
  if (error != 0) lose(std::string("cannot post a write: ") + std::strerror(error));
}

void RdmaData::on_sent(std::uint64_t number) {
  if (number >= posted_) return;
  wants_room_ = false;
  while (completed_ <= number && !closed) {
    const Pending done = std::exchange(pending_[completed_ % kDataWindow], {});
    ++completed_;
    if (done.source != nullptr) state.registrations.release(done.source);
    if (done.token == kNoToken) continue;
    --tokens_;
    sink->on_written(*this, done.token);
  }
}

void RdmaData::on_arrived(const ibv_wc& completion) {
  if (completion.opcode != IBV_WC_RECV_RDMA_WITH_IMM) return lose("it broke the protocol of writes");
  ++received;
  sink->on_write(*this, from_wire(completion.imm_data), completion.byte_len);
}

// ---- All endpoints' completions

int RdmaTransport::poll() {
  endpoints_.destroy_closed();
  if (!context_) return state_.losses_due ? tell_losses() : 0;
  int found = state_.in_turn.empty() ? 0 : endpoints_.begin_turn();
  found += take_completions(context_->sent.get()) + take_completions(context_->received.get());
  if (found == 0) context_->settle();
  context_->shared_receives.repost();
  if (state_.losses_due) found += tell_losses();
  if (!removal_.empty()) lose_device(std::exchange(removal_, {}));
  return found;
}

int RdmaTransport::take_completions(ibv_cq* cq) {
  int found = 0;
  std::array<ibv_wc, kPollBatch> batch;
  for (int round = 0; round < kMostBatches; ++round) {
    const int count = ibv_poll_cq(cq, kPollBatch, batch.data());
    for (int i = 0; i < count; ++i) dispatch(batch[static_cast<std::size_t>(i)]);
    if (count > 0) found += count;
    if (count < static_cast<int>(kPollBatch)) break;
  }
  return found;
}

void RdmaTransport::dispatch(const ibv_wc& completion) {
  const WrId id(completion.wr_id);
  if (id.kind() == WrId::Kind::kEmptyReceive) context_->shared_receives.count_arrival();
  RcEndpoint* const found = endpoints_.by_number(completion.qp_num);
  if (found == nullptr || found->is_loss_told()) return;
  RcEndpoint& endpoint = *found;
  if (completion.status != IBV_WC_SUCCESS) {
    // The first failure says why; what comes after it is flushed. And a peer that ended may have made others end, whose
    // connections fail now. So what the connection manager knows is told before.
    note_cm_events();
    endpoint.lose(in_words(completion.status));
  } else if (id.kind() == WrId::Kind::kSend) {
    endpoint.on_sent(id.number());
  } else {
    endpoint.on_arrived(completion);
  }
}

bool RdmaTransport::arm() {
  if (!context_) return !state_.losses_due;
  if (poll() > 0) return false;  // what we sent a moment ago is often there already
  context_->arm(endpoints_.awaits_completions());
  // Nothing announces what came in before the queues were armed.
  return poll() == 0 && !state_.losses_due;
}

}  // namespace bps::transport::rdma
