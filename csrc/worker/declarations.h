// SPDX-License-Identifier: Apache-2.0
// Keeps the tensors that this rank has declared, and the groups that it knows.
//
// Any thread may call it. Operations do not need the mutex, except additions to stored weights, which ask for alone().
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

class Declarations {
 public:
  // Tensors share `recorder` and `view_end`; what is passed by reference outlives the declarations. The worker adds
  // its loops before the first tensor is declared.
  Declarations(const WorkerOptions& options, van::Van& van, Planner& planner,
               const std::vector<WorkerLoop*>& worker_loops, std::shared_ptr<FlightRecorder> recorder,
               std::shared_ptr<ViewEnd> view_end);

  // Returns the tensors of these names, after one round trip for those not declared yet, and connects to their servers.
  // `shape` is for people. Throws kMismatch when a name is used again with another dtype or size, on this rank or on
  // another one.
  std::vector<std::shared_ptr<Tensor>> declare(std::span<const van::TensorSpec> tensors);
  // Declares a name that is used once, and cuts it into partitions like a tensor of the view before. Otherwise the
  // number of servers would decide that.
  std::shared_ptr<Tensor> declare_like(const Tensor& like, std::uint32_t group, const std::string& name);
  // Returns the tensor in the group of this rank alone. It has the same id and partitions, but rounds of its own.
  std::shared_ptr<Tensor> alone(Tensor& tensor);
  // Lists the tensors of declare(), not those of declare_like() or alone().
  std::vector<std::shared_ptr<Tensor>> all() const;
  // Marks a tensor as failed, also one that is not declared yet. Operations on it throw kMismatch with `why`.
  void fail(std::uint32_t id, const std::string& why);

  // Makes a group, with one round trip. Throws kTimeout when a rank of it does not ask for it.
  van::Group new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s);
  van::Group world() const;
  std::shared_ptr<const van::Group> group(std::uint32_t id) const;  // throws kInvalidArgument
  std::uint32_t rank() const;

 private:
  std::shared_ptr<Tensor> make(const van::TensorSpec& spec, const van::TensorId& id, const Tensor* like = nullptr);
  void check_compression(const van::TensorSpec& spec) const;
  void note_encoded(Tensor& tensor) const;

  const WorkerOptions& options_;
  van::Van& van_;
  Planner& planner_;
  const std::vector<WorkerLoop*>& worker_loops_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const std::shared_ptr<ViewEnd> view_end_;
  mutable std::mutex mutex_;  // guards what follows
  std::map<std::pair<std::uint32_t, std::string>, std::shared_ptr<Tensor>> tensors_;
  std::vector<std::shared_ptr<Tensor>> more_tensors_;  // those of declare_like(): the recorder points to them
  std::map<std::uint32_t, std::shared_ptr<const van::Group>> groups_;
  std::map<std::uint32_t, std::string> mismatched_;  // id of a tensor that ranks disagree about -> what to say
};

}  // namespace bps::worker
