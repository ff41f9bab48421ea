// SPDX-License-Identifier: Apache-2.0
// Implements the control endpoint of rdma. Messages are sends into the peer's posted buffers.
//
// Both sides have buffers of 4 KiB, registered once with the endpoint. Longer messages are cut, and put together again
// in the order in which a queue pair delivers. A message that finds no free buffer waits in ordinary memory, as it
// would in a socket. No payload and no remote memory are possible: the queue pair allows neither.
//
// In a turn of the loop a peer may say as much as TurnBudget allows. What has arrived beyond that stays in its buffers,
// which are not posted again meanwhile. So the peer's device waits when they are full.
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
  // Sends an empty message, which the peer drops: what counts is whether its device acknowledges it. Sends none while
  // something else is under way that shows the same.
  void probe();
  // Returns true when nothing posted has been acknowledged for a while. (A peer that is stopped has buffers left.)
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
  static constexpr std::uint32_t kSilentLooks = 5;  // at intervals of kPathCheck_s
  static constexpr std::size_t kRoom = kControlBuffer - sizeof(Fragment);

  std::byte* receive_buffer(std::uint64_t number) const { return buffers_.get() + number * kControlBuffer; }
  std::byte* send_buffer(std::uint64_t number) const { return receive_buffer(kControlReceives + number); }
  struct Waiting {
    Bytes message;
    std::size_t offset;
  };
  // Posts pieces from `offset` on while there are buffers. Returns true when the whole message is on its way.
  bool transmit(std::span<const std::byte> message, std::size_t& offset);
  // Posts one piece, or, without bytes, a probe.
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
  std::optional<TurnBudget> budget_;  // that of this turn, once something has arrived in it
  bool is_spent_ = false;
  std::deque<Arrived> held_;  // at most kControlReceives
  Bytes partial_;             // the pieces so far of a message that arrives in several
  std::size_t expected_ = 0;  // its whole size; 0: none has begun
};

}  // namespace bps::transport::rdma
