// SPDX-License-Identifier: Apache-2.0
// Holds one loop's share of a device: a verbs context of its own, a protection domain, completion queues and a shared
// receive queue. Connections that were made of it hold on to it, so that it ends after all of them.
//
// Sent and received requests complete on different queues. Arrivals wake the loop. The loop sees the end of what it
// sent when it polls, and is woken by it only while somebody waits for it (a token, or room in a window).
//
// Any thread may make a QueuePair or register memory of our own; everything else belongs to the thread of the loop.
// Set-up throws.
#pragma once

#include <span>
#include <string>

#include "transport/memory.h"
#include "transport/rdma/completion_queue.h"
#include "transport/rdma/rail.h"
#include "transport/rdma/retired_queue_pairs.h"
#include "transport/rdma/shared_receive_queue.h"
#include "transport/rdma/verbs.h"

namespace bps::transport::rdma {

class Context {
 public:
  Context(const Rail& rail, const RdmaOptions& options);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Registers memory of our own, for headers and messages. Peers cannot reach it.
  Mr register_own(std::span<std::byte> bytes);
  Mr register_for_peers(std::span<std::byte> bytes);
  Mr register_for_peers(const ForeignMemory& memory);

  ibv_context* device() const { return device_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  ibv_comp_channel* channel() const { return channel_.get(); }
  const Rail& rail() const { return rail_; }
  const RdmaOptions& options() const { return options_; }

  // Is called when both completion queues have just been seen empty.
  void settle() {
    sent.settle();
    received.settle();
    shared_receives.settle();
  }
  // From now on a completion makes the channel readable: an arrival in any case, the end of a request if `sends`.
  void arm(bool sends);
  // Is called when the channel is readable.
  void take_completion_events();

 private:
  const Rail rail_;
  const RdmaOptions options_;
  VerbsContext device_;
  const std::uint32_t most_completions_;  // those that one queue can hold
  Pd pd_;
  CompChannel channel_;

 public:
  CompletionQueue sent;
  CompletionQueue received;
  SharedReceiveQueue shared_receives;
  RetiredQueuePairs retired;
};

// Throws kTransport with errno in words, and with what to do.
[[noreturn]] void fail_making(const char* what, const Rail& rail);

}  // namespace bps::transport::rdma
