// SPDX-License-Identifier: Apache-2.0
// The events that a worker loop tells of. They are set and called on the loop's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace bps::worker {

class Operation;

struct LoopEvents {
  // The connection to a server breaks; answer with lose_server(), soon. Without it the operations of that server fail
  // at once.
  std::function<void(std::uint32_t node, const std::string& why)> when_lost;
  // A server that owes a reply has been silent for two seconds, although its connection is open. If others hear it,
  // answer with on_reachable().
  std::function<void(std::uint32_t node)> when_silent;
  // One path of several to the server at `place` is lost, and both ends of it are closed; answer with add_path(), when
  // it can be connected again.
  std::function<void(std::size_t place, std::size_t pair)> when_path_lost;
  // The deadlines of operations were checked: this is the first one that is not done, or null.
  std::function<void(const Operation* first)> when_checked;
  // An operation fails on this loop, told once; the other loops must cancel() their parts of it.
  std::function<void(const std::shared_ptr<Operation>&)> when_failing;
};

}  // namespace bps::worker
