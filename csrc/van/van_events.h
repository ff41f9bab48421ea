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
  // The scheduler has been found, and this is the view that it tells: before the node asks to join.
  std::function<void(const transport::ViewId&)> on_view = nullptr;
  // A node can no longer be used; `node` 0 is the scheduler. `why` is a sentence for people that names the first cause:
  // this node, or the one whose loss made this one leave. Reported once per node.
  std::function<void(std::uint32_t node, const std::string& why)> on_lost;
  // Workers: this worker has left the job as it should. What it has contributed to still completes; `why` says so of
  // what waits for more.
  std::function<void(std::uint32_t node, const std::string& why)> on_left;
  // A node that inquire() asked about has been heard of since: it runs, and can reach the scheduler.
  std::function<void(std::uint32_t node)> on_reachable;
  // The job goes on as another view, which this node has to join by another van: everything that is under way fails
  // with kRoundAborted, and so does every further call.
  std::function<void(const std::string& why)> on_view_ended = nullptr;
  // Somebody wants to know what this process does; answer with Van::tell().
  std::function<void(const Question&)> on_question = nullptr;
  // Servers: a group exists. No worker uses it before `known` is called, by any thread. Null for the group of all,
  // which is told before this node has joined.
  std::function<void(const Group&, std::function<void()> known)> on_group;
  // Workers: ranks disagree about this tensor; operations on it cannot complete.
  std::function<void(std::uint32_t tensor, const std::string& why)> on_tensor_failed;
  // Workers: operations of this round cannot complete, because ranks have called different ones.
  std::function<void(const RoundFailed&)> on_round_failed = nullptr;
  // A heartbeat is sent: what this node's links carry, and what it waits for, may be told with it, by Van::tell().
  std::function<void()> on_beat = nullptr;
  // Workers: servers are about to get other weights; answer with Van::tell(). Then what has become of that.
  std::function<void(const BeginShift&)> on_shift_begun = nullptr;
  std::function<void(const EndShift&)> on_shift_ended = nullptr;
  // Asked before each heartbeat, which proves more than that the van's thread lives: what of this node has made no
  // progress since this answered "" last, `silence` ago. Without an answer of "" no heartbeat is sent, and the node is
  // lost in the end.
  std::function<std::string(Duration silence)> find_stuck = nullptr;
  // Asked of a server once the scheduler is lost: whether a worker is still connected to it. The last one ends it.
  std::function<bool()> is_in_use = nullptr;
};

}  // namespace bps::van
