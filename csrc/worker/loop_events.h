// SPDX-License-Identifier: Apache-2.0
// A worker loop tells of events by these functions. They are set and called on the loop's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace bps::worker {

class Operation;

struct LoopEvents {
  // Is called when the connection to a server breaks, and to be answered with lose_server(), soon. Where it is not set,
  // the operations of that server fail at once.
  std::function<void(std::uint32_t node, const std::string& why)> when_lost;
  // Is called when a server that owes a reply has been silent for two seconds, although its connection is open. It is
  // to be answered with on_reachable() if others hear the server.
  std::function<void(std::uint32_t node)> when_silent;
  // Is called when one path of several to the server at `place` is lost, and both ends of it are closed. It is to be
  // answered with add_path(), when the path can be connected again.
  std::function<void(std::size_t place, std::size_t pair)> when_path_lost;
  // Is called after the deadlines of operations were checked, with the first one that is not done, or null.
  std::function<void(const Operation* first)> when_checked;
  // Is called once when an operation fails on this loop. The other loops must then cancel() their parts of it.
  std::function<void(const std::shared_ptr<Operation>&)> when_failing;
};

}  // namespace bps::worker
