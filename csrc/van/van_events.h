// SPDX-License-Identifier: Apache-2.0
// A van tells its process by these functions. It calls them on its own thread, and they must not block.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/clock.h"
#include "transport/handshake.h"
#include "van/membership.h"
#include "van/messages.h"

namespace bps::van {

struct VanEvents {
  // Tells the view that the scheduler has named, when it has been found and before the node asks to join.
  std::function<void(const transport::ViewId&)> on_view = nullptr;
  // Tells that a node can no longer be used; `node` 0 is the scheduler. `why` is a sentence for people that names the
  // first cause: this node, or the one whose loss made this one leave. Reported once per node.
  std::function<void(std::uint32_t node, const std::string& why)> on_lost;
  // Tells workers that this worker has left the job as it should. What it has contributed to still completes. What
  // needs more of it fails, and `why` is the text for that.
  std::function<void(std::uint32_t node, const std::string& why)> on_left;
  // Tells that a node has been heard of since inquire() asked about it: it runs, and can reach the scheduler.
  std::function<void(std::uint32_t node)> on_reachable;
  // Tells that the job goes on as another view, which this node has to join by another van. Everything that is under
  // way fails with kRoundAborted, and so does every further call.
  std::function<void(const std::string& why)> on_view_ended = nullptr;
  // Asks what this process does. It is to be answered with Van::tell().
  std::function<void(const Question&)> on_question = nullptr;
  // Tells servers that a group exists. No worker uses it before `known` is called, by any thread. `known` is null for
  // the group of all, which is told before this node has joined.
  std::function<void(const Group&, std::function<void()> known)> on_group;
  // Tells workers that ranks disagree about this tensor, so that operations on it cannot complete.
  std::function<void(std::uint32_t tensor, const std::string& why)> on_tensor_failed;
  // Tells workers that operations of this round cannot complete, because ranks have called different ones.
  std::function<void(const RoundFailed&)> on_round_failed = nullptr;
  // Is called when a heartbeat is sent. What this node's links carry, and what it waits for, may be told with it, by
  // Van::tell().
  std::function<void()> on_beat = nullptr;
  // The first tells workers that servers are about to get other weights, and is to be answered with Van::tell(). The
  // second tells what has become of that.
  std::function<void(const BeginShift&)> on_shift_begun = nullptr;
  std::function<void(const EndShift&)> on_shift_ended = nullptr;
  // Is asked before each heartbeat what of this node has made no progress since it answered "" last, `silence` ago. So
  // a heartbeat proves more than that the van's thread lives: unless the answer is "" none is sent, and the node is
  // lost in the end.
  std::function<std::string(Duration silence)> find_stuck = nullptr;
  // Is asked, on a server whose scheduler is lost, whether a worker is still connected to it. The server ends when none
  // is.
  std::function<bool()> is_in_use = nullptr;
};

}  // namespace bps::van
