// One loop's share of a device: its own device, protection domain, completion queues and shared receive queue. What
// was made of it holds on to it, so that it ends after all of that.
//
// Sent and received requests complete on different queues. Arrivals wake the loop; of what it sent it hears when it
// looks, and is woken only while somebody waits for it (a token, or room in a window).
//
// Threading: make_qp() and register_own() from any thread; everything else on the loop's. Errors: set-up throws.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "transport/rdma/capacity.h"
#include "transport/rdma/rail.h"
#include "transport/rdma/verbs.h"
#include "transport/transport.h"

namespace bps::transport::rdma {

class Context;

// A queue pair, and its places in the completion queues.
class QueuePair {
 public:
  QueuePair() = default;
  QueuePair(std::shared_ptr<Context> context, Plane plane);
  QueuePair(QueuePair&& other) noexcept { *this = std::move(other); }
  QueuePair& operator=(QueuePair&& other) noexcept;
  ~QueuePair() { reset(); }

  void reset();
  explicit operator bool() const { return qp_ != nullptr; }
  ibv_qp* get() const { return qp_.get(); }
  std::uint32_t number() const { return qp_->qp_num; }
  std::uint32_t inline_limit() const { return inline_limit_; }

 private:
  std::shared_ptr<Context> context_;
  Plane plane_ = Plane::kData;
  std::uint32_t inline_limit_ = 0;
  Qp qp_;
};

class Context {
 public:
  Context(const Rail& rail, const RdmaOptions& options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Memory of our own, for headers and messages: peers cannot reach it.
  Mr register_own(std::span<std::byte> bytes);
  Mr register_for_peers(std::span<std::byte> bytes);

  // Posts empty receives until `kSharedReceives` are there; call when enough are missing.
  void repost();
  void count_arrival() { ++missing_receives_; }
  bool should_repost() const { return missing_receives_ >= kRepostBatch; }
  // The queue runs low, perhaps because queue pairs that broke took receives with them that nobody counted.
  void note_shortage() { shortage_ = true; }

  ibv_context* device() const { return device_.get(); }
  ibv_cq* send_cq() const { return send_cq_.get(); }
  ibv_cq* receive_cq() const { return receive_cq_.get(); }
  ibv_srq* srq() const { return srq_.get(); }
  ibv_comp_channel* completions() const { return completions_.get(); }
  std::uint64_t message_limit() const { return message_limit_; }
  const Rail& rail() const { return rail_; }
  const RdmaOptions& options() const { return options_; }

  // Both completion queues have just been seen empty: what belonged to queue pairs that are gone can be used again.
  void settle() {
    if (has_returns_.load(std::memory_order_relaxed)) take_returns();
    if (shortage_) refill();
  }

  // From now on a completion makes the channel readable: an arrival in any case, the end of a request if `sends`.
  void arm(bool sends);
  // The channel is readable.
  void take_completion_events();

 private:
  friend class QueuePair;
  Qp make_qp(Plane plane, std::uint32_t& inline_limit);
  void give_back(Plane plane);
  void take_returns();
  void refill();

  const Rail rail_;
  const RdmaOptions options_;
  VerbsContext device_;
  Pd pd_;
  CompChannel completions_;
  Cq send_cq_;
  Cq receive_cq_;
  Srq srq_;
  std::uint64_t message_limit_ = 0;
  std::mutex set_up_;  // the budgets: connections are made on their callers' threads
  QueueBudget send_budget_{0, 0, 0};
  QueueBudget receive_budget_{0, 0, 0};
  std::uint32_t returned_sends_ = 0;  // of queue pairs whose completions may still lie in the queues
  std::uint32_t returned_receives_ = 0;
  std::atomic<bool> has_returns_{false};
  bool shortage_ = false;
  std::uint32_t missing_receives_ = kSharedReceives;
  std::array<ibv_recv_wr, kRepostBatch> empty_receives_{};  // a chain, made once
  bool send_armed_ = false;  // no event has come since; asking again would be a system call for nothing
  bool receive_armed_ = false;
  unsigned send_events_ = 0;  // seen; they have to be acknowledged before the queues can go
  unsigned receive_events_ = 0;
};

}  // namespace bps::transport::rdma
