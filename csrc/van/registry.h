// SPDX-License-Identifier: Apache-2.0
// Keeps the tensors and groups of a job, by name. It is a pure state machine of the scheduler: no sockets, no clock.
//
// The memory that one rank can make it keep is bounded. Otherwise a member could use up the memory of the scheduler,
// and, with a new name for each call, in time that of all members.
//
// A tensor's id is a hash of its group and name, so it does not depend on the order in which ranks declare. Two names
// that collide get neighbouring ids. A tensor on which ranks disagree stays failed, and every rank that uses it is
// told.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tensor/partition.h"
#include "van/membership.h"

namespace bps::van {

class Registry {
 public:
  using Hash = std::function<std::uint64_t(std::uint32_t group, std::string_view name)>;
  static std::uint64_t fnv1a(std::uint32_t group, std::string_view name);

  // Keeps the load from which a tensor was placed, with key hash `balanced`. In the next view the tensor is placed from
  // the same load, and so stays where it is.
  struct Placed {
    TensorSpec spec;
    std::vector<std::uint64_t> load;
  };
  using Placements = std::map<std::pair<std::uint32_t, std::string>, Placed>;

  struct Options {
    std::uint32_t workers = 1;
    std::uint32_t servers = 1;  // or key slots, see Membership
    bool balanced = false;      // key hash `balanced`: keep count of the bytes on each server
    tensor::CutRule cut{};      // for `balanced`, as the next one
    std::function<std::vector<std::uint32_t>(const Group&)> weights{};  // of servers, by key slot; none: all are equal
    std::shared_ptr<const Placements> before{};                         // those of the view before
    std::uint64_t most_kept = 256 << 20;  // bytes for each rank, see keep(): some 700,000 names
    Hash hash = fnv1a;
  };
  explicit Registry(Options options);

  struct Conflict {
    std::uint32_t tensor;
    std::string text;
    std::vector<std::uint32_t> ranks;  // those that had declared it and are to be told
  };
  struct Declared {
    std::vector<TensorId> ids;        // one per specification, if all went well
    std::string problem;              // what to tell the caller if not all went well
    bool is_too_much = false;         // the problem is that a rank declares too much, see keep()
    std::vector<Conflict> conflicts;  // those that this call has caused
  };
  Declared declare(std::uint32_t rank, std::span<const TensorSpec> specs);
  // Notes that a worker wishes for partitions of at most so many bytes. partition_limit() is the smallest wish, or 0.
  void limit_partitions(std::uint64_t bytes);
  std::uint64_t partition_limit() const { return partition_limit_; }
  // Returns the placements that the next view's registry is to know.
  std::shared_ptr<const Placements> placements() const;

  // Counts what a rank makes the scheduler keep: names that it is the first to declare, groups that it is the first to
  // ask for. Returns what is wrong where that becomes too much, else "".
  std::string keep(std::uint32_t rank, std::uint64_t bytes, const std::string& what);
  void give_back(std::uint32_t rank, std::uint64_t bytes) { kept_[rank] -= bytes; }
  // Returns the bytes that keep() counts for a group.
  static std::uint64_t bytes_of(const std::vector<std::uint32_t>& ranks, const std::string& name);

  // Returns why `ranks` cannot be a group made by `caller`, or "".
  std::string check_group(const std::vector<std::uint32_t>& ranks, std::uint32_t caller) const;
  const Group* find_group(const std::vector<std::uint32_t>& ranks, const std::string& name) const;
  const Group& add_group(std::vector<std::uint32_t> ranks, const std::string& name);
  // Returns nullptr for an id that does not exist. Group 0, all workers, always exists.
  const Group* group(std::uint32_t id) const;
  // Lists the groups as JSON: [{"id", "name", "ranks"}].
  std::string describe_groups() const;

 private:
  struct Tensor {
    TensorSpec spec;
    TensorId id;
    std::uint32_t first_rank;
    std::vector<bool> declared_by;  // by position in the group
    std::string failure;
  };
  struct Entry {
    Group group;
    std::unordered_map<std::string, Tensor> tensors;
  };

  std::uint64_t bytes_of(const Group& group, const TensorSpec& spec) const;
  void add_tensor(const Group& group, Tensor& tensor, const TensorSpec& spec, std::uint32_t rank);
  std::uint32_t free_id(std::uint32_t group, std::string_view name);
  const std::vector<std::uint64_t>& load_for(const TensorSpec& spec) const;
  void place(const Group& group, const TensorSpec& spec, const std::vector<std::uint64_t>& from);

  Options options_;
  std::uint64_t partition_limit_ = 0;
  std::deque<Entry> groups_;  // by id; references to groups stay valid
  std::map<std::pair<std::vector<std::uint32_t>, std::string>, std::uint32_t> group_ids_;
  std::unordered_set<std::uint32_t> tensor_ids_;
  std::vector<std::uint64_t> load_;  // bytes on each server, or slot
  std::vector<std::uint64_t> kept_;  // by rank
};

}  // namespace bps::van
