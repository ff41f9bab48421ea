// SPDX-License-Identifier: Apache-2.0
// The tensors that this rank has declared, and the groups that it knows.
//
// Threading: any thread. The mutex is one that the data path never sees.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "van/van.h"
#include "worker/planner.h"
#include "worker/worker_loop.h"
#include "worker/worker_options.h"

namespace bps::worker {

struct LoopOf {
  WorkerLoop* worker_loop;
  transport::Reactor* reactor;
};

class Declarations {
 public:
  // Tensors share `recorder` and `view_ended`; what is passed by reference outlives the declarations.
  Declarations(const WorkerOptions& options, van::Van& van, Planner& planner, const std::vector<LoopOf>& worker_loops,
               std::shared_ptr<FlightRecorder> recorder, std::shared_ptr<std::atomic<bool>> view_ended);

  // One round trip for those not declared yet. `shape` is for people. Throws kMismatch when a name is used again with
  // another dtype or size, on this rank or on another one.
  std::vector<std::shared_ptr<Tensor>> declare(std::span<const van::TensorSpec> tensors);
  // A name that is used once, cut into partitions like a tensor of the view before: the number of servers decides that.
  std::shared_ptr<Tensor> declare_like(const Tensor& like, std::uint32_t group, const std::string& name);
  // The tensor in the group of this rank alone: with the same id and partitions, but rounds of its own.
  std::shared_ptr<Tensor> alone(Tensor& tensor);
  // Those that users have declared.
  std::vector<std::shared_ptr<Tensor>> all() const;
  // The ranks disagree about this tensor.
  void fail(std::uint32_t id, const std::string& why);

  van::Group new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s);
  van::Group world() const;
  std::shared_ptr<const van::Group> group(std::uint32_t id) const;
  std::uint32_t rank() const;

 private:
  std::shared_ptr<Tensor> make(const van::TensorSpec& spec, const van::TensorId& id, const Tensor* like = nullptr);
  void check_compression(const van::TensorSpec& spec) const;

  const WorkerOptions& options_;
  van::Van& van_;
  Planner& planner_;
  const std::vector<LoopOf>& worker_loops_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const std::shared_ptr<std::atomic<bool>> view_ended_;
  mutable std::mutex mutex_;  // guards what follows
  std::map<std::pair<std::uint32_t, std::string>, std::shared_ptr<Tensor>> tensors_;
  std::vector<std::shared_ptr<Tensor>> more_tensors_;  // which the recorder may name
  std::map<std::uint32_t, std::shared_ptr<const van::Group>> groups_;
  std::map<std::uint32_t, std::string> mismatched_;  // id of a tensor that ranks disagree about -> what to say
};

}  // namespace bps::worker
