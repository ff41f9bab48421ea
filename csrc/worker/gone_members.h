// SPDX-License-Identifier: Apache-2.0
// The members that are gone, and why nothing more is begun: what a worker asks before it starts an operation.
//
// Threading: any thread. As long as everybody is here, check() is one load.
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

  // Nothing more is begun: the view has ended, or this process leaves. The first reason counts.
  void end(const Error& why);
  // False: it was known. `why` names the cause.
  bool note_lost(std::uint32_t node, const std::string& why);
  // It has left as it should.
  void note_left(std::uint32_t node, const std::string& why);

  bool is_any() const { return is_any_.load(); }
  // Throws where an operation on this tensor cannot begin any more.
  void check(const Tensor& tensor, tensor::OperationKind kind) const;
  // Throws where one that has begun cannot complete. One to which a member that has left had to contribute is failed by
  // its servers, which know whether it has.
  void check_lost(const Tensor& tensor) const;
  // True when the loss of a member keeps the group from summing: it belongs to it, sums for it, or may be the relay of
  // ranks that do.
  bool concerns(const van::Node& gone, const van::Group& group) const;

 private:
  const van::Van& van_;
  const van::Hosts& hosts_;
  std::atomic<bool> is_any_{false};
  mutable std::mutex mutex_;
  std::optional<Error> why_ended_;                           // this and what follows: guarded by mutex_
  std::vector<std::pair<std::uint32_t, std::string>> lost_;  // node id and what to say, the first loss first
  std::vector<std::pair<std::uint32_t, std::string>> left_;
};

}  // namespace bps::worker
