// SPDX-License-Identifier: Apache-2.0
// One loop's share of a device: a verbs context of its own, a protection domain, completion queues and a shared receive
// queue. Connections that were made of it hold on to it, so that it ends after all of them.
//
// Sent and received requests complete on different queues. Arrivals wake the loop; of what it sent it hears when it
// polls, and is woken only while somebody waits for it (a token, or room in a window).
//
// Threading: a QueuePair is made, and own memory registered, from any thread; everything else on the loop's. Errors:
// set-up throws.
#pragma once

#include <span>
#include <string>

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

  // Memory of our own, for headers and messages: peers cannot reach it.
  Mr register_own(std::span<std::byte> bytes);
  Mr register_for_peers(std::span<std::byte> bytes);

  ibv_context* device() const { return device_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  ibv_comp_channel* channel() const { return channel_.get(); }
  const Rail& rail() const { return rail_; }
  const RdmaOptions& options() const { return options_; }

  // Both completion queues have just been seen empty.
  void settle() {
    sent.settle();
    received.settle();
    shared_receives.settle();
  }
  // From now on a completion makes the channel readable: an arrival in any case, the end of a request if `sends`.
  void arm(bool sends);
  // The channel is readable.
  void take_completion_events();

 private:
  const Rail rail_;
  const RdmaOptions options_;
  VerbsContext device_;
  const std::uint32_t most_completions_;  // in one queue
  Pd pd_;
  CompChannel channel_;

 public:
  CompletionQueue sent;
  CompletionQueue received;
  SharedReceiveQueue shared_receives;
  RetiredQueuePairs retired;
};

// Throws kTransport with errno in words and what to do.
[[noreturn]] void fail_making(const char* what, const Rail& rail);

}  // namespace bps::transport::rdma
