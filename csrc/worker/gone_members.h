// SPDX-License-Identifier: Apache-2.0
// Knows the members that are gone, and why nothing more is begun. A worker asks it before it starts an operation.
//
// Any thread may call it. As long as all members are here, check() is one load.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "tensor/extent.h"
#include "van/hosts.h"
#include "van/van.h"
#include "worker/tensor.h"

namespace bps::worker {

class GoneMembers {
 public:
  // Both must outlive it.
  GoneMembers(const van::Van& van, const van::Hosts& hosts) : van_(van), hosts_(hosts) {}

  // Notes that nothing more is begun, because the view has ended or this process leaves. The first reason counts.
  void end(const Error& why);
  // Notes that a node is lost; `why` names the cause. Returns false where that was known.
  bool note_lost(std::uint32_t node, const std::string& why);
  // Notes that a node has left as it should.
  void note_left(std::uint32_t node, const std::string& why);

  bool is_any() const { return is_any_.load(); }
  // Throws where an operation on this tensor cannot begin any more.
  void check(const Tensor& tensor, tensor::OperationKind kind) const;
  // Throws where an operation that has begun cannot complete. Members that have left do not count here: the servers
  // know whether such a member has contributed, and fail the operation if it has not.
  void check_lost(const Tensor& tensor) const;
  // Returns true when the loss of a member keeps the group from summing: it belongs to the group, sums for it, or may
  // be the relay of ranks that belong to it.
  bool concerns(const van::Node& gone, const van::Group& group) const;

 private:
  const van::Van& van_;
  const van::Hosts& hosts_;
  std::atomic<bool> is_any_{false};
  mutable std::mutex mutex_;
  std::optional<Error> why_ended_;                           // guarded by mutex_, as the next two
  std::vector<std::pair<std::uint32_t, std::string>> lost_;  // node id and what to say, the first loss first
  std::vector<std::pair<std::uint32_t, std::string>> left_;
};

}  // namespace bps::worker
