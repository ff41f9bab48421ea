// SPDX-License-Identifier: Apache-2.0
// The control endpoint of rdma: messages as sends into the peer's posted buffers.
//
// Buffers of 4 KiB, registered once with the endpoint, on both sides; longer messages are cut, and put together again
// in the order in which a queue pair delivers. What finds no free buffer waits in ordinary memory, as it would in a
// socket. No payload and no remote memory: the queue pair allows neither.
//
// In a turn of the loop a peer may say as much as TurnBudget allows. What has arrived beyond that stays in its buffers,
// which are not posted again meanwhile; so the peer's device waits when they are full.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "core/turn_budget.h"
#include "transport/rdma/rdma_endpoint.h"
#include "transport/rdma/wire.h"

namespace bps::transport::rdma {

class RdmaControl final : public RdmaEndpoint<ControlEndpoint> {
 public:
  RdmaControl(const Hello& made_by, TransportState& state, RcConnection connection);

  Status send(std::span<const std::byte> message) override;
  // Sends what the peer drops: what counts is whether its device acknowledges it. Not while something else is under way
  // that shows the same.
  void probe();
  // Requests that are posted have not been acknowledged for so long. (A peer that is stopped has buffers left.)
  bool is_silent() const override { return state.port_down || acknowledgements.missed() >= kSilentLooks; }
  bool is_flushed() const override { return is_lost() || (completed_ == posted_ && waiting_.empty()); }

  void on_sent(std::uint64_t number) override;
  void on_arrived(const ibv_wc& completion) override;
  int begin_turn() override;
  bool holds_messages() const override { return !held_.empty(); }
  bool awaits_completions() const override { return !waiting_.empty(); }
  void look() override { acknowledgements.look(posted_, completed_); }
  void give_up_sends() override { waiting_.clear(); }
  void drop() override;

 private:
  static constexpr std::uint32_t kSilentLooks = 5;  // of kPathCheck_s
  static constexpr std::size_t kRoom = kControlBuffer - sizeof(Fragment);

  std::byte* receive_buffer(std::uint64_t number) const { return buffers_.get() + number * kControlBuffer; }
  std::byte* send_buffer(std::uint64_t number) const { return receive_buffer(kControlReceives + number); }
  struct Waiting {
    Bytes message;
    std::size_t offset;
  };
  // Posts pieces from `offset` on while there are buffers; true when the whole message is on its way.
  bool transmit(std::span<const std::byte> message, std::size_t& offset);
  // One piece, or, without bytes, a probe.
  void post_send(std::span<const std::byte> piece);
  bool post_receive(std::uint64_t buffer);
  struct Arrived {
    std::uint64_t buffer;
    std::uint32_t bytes;
  };
  void handle(const Arrived& piece);
  bool take(std::span<const std::byte> piece);

  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{kControlBuffer}); }
  };
  std::unique_ptr<std::byte, Free> buffers_;
  Mr memory_;
  std::uint64_t posted_ = 0;
  std::uint64_t completed_ = 0;
  std::deque<Waiting> waiting_;
  std::optional<TurnBudget> budget_;  // of this turn, once something has arrived in it
  bool is_spent_ = false;
  std::deque<Arrived> held_;  // at most kControlReceives
  Bytes partial_;             // of a message that arrives in pieces
  std::size_t expected_ = 0;  // its whole size; 0: none has begun
};

}  // namespace bps::transport::rdma
