// SPDX-License-Identifier: Apache-2.0
#include "van/registry.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/dtype.h"
#include "core/json.h"
#include "tensor/key_map.h"

namespace bps::van {
namespace {

constexpr std::uint32_t kIdMask = (1U << 30) - 1;
constexpr std::uint64_t kEntryBytes = 256;  // those of a name or a group, beside its text and its ranks

std::string describe(const TensorSpec& spec, std::uint32_t rank) {
  const std::string shape = spec.shape.empty() ? "of " + std::to_string(spec.count) + " elements" : spec.shape;
  const std::string compressed = spec.compression.empty() ? "" : ", compressed by '" + spec.compression + "',";
  return std::string(to_string(Dtype{spec.dtype})) + " " + shape + compressed + " on rank " + std::to_string(rank);
}

}  // namespace

std::uint64_t Registry::fnv1a(std::uint32_t group, std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&hash](std::uint8_t byte) { hash = (hash ^ byte) * 0x100000001b3; };
  for (unsigned shift = 0; shift < 32; shift += 8) mix(static_cast<std::uint8_t>(group >> shift));
  for (const char letter : name) mix(static_cast<std::uint8_t>(letter));
  return hash;
}

Registry::Registry(Options options)
    : options_(std::move(options)), load_(options_.balanced ? options_.servers : 0), kept_(options_.workers) {
  std::vector<std::uint32_t> all(options_.workers);
  std::iota(all.begin(), all.end(), 0);
  groups_.push_back({{0, std::move(all)}, {}});
}

Registry::Declared Registry::declare(std::uint32_t rank, std::span<const TensorSpec> specs) {
  Declared result;
  result.ids.reserve(specs.size());
  std::size_t problems = 0;
  const auto complain = [&](const std::string& text) {
    if (problems++ == 0) result.problem = text;
  };
  for (const TensorSpec& spec : specs) {
    if (spec.group >= groups_.size()) {
      complain("tensor '" + spec.name + "' names the group " + std::to_string(spec.group) + ", which does not exist");
      continue;
    }
    Entry& entry = groups_[spec.group];
    const auto member = entry.group.index_of(rank);
    if (member == kNoRank) {
      complain("tensor '" + spec.name + "' belongs to group " + std::to_string(spec.group) + " (" +
               name_ranks(entry.group.ranks) + "), rank " + std::to_string(rank) + " does not");
      continue;
    }
    auto found = entry.tensors.find(spec.name);
    if (found == entry.tensors.end()) {
      const std::string problem = keep(rank, bytes_of(entry.group, spec), "tensor '" + spec.name + "'");
      if (!problem.empty()) {
        complain(problem);
        result.is_too_much = true;
        break;
      }
      found = entry.tensors.try_emplace(spec.name).first;
      add_tensor(entry.group, found->second, spec, rank);
    }
    Tensor& tensor = found->second;
    if (!tensor.failure.empty()) {
      complain(tensor.failure);
      continue;
    }
    if (tensor.spec != spec) {
      const std::string text =
          "tensor '" + spec.name + "' is " + describe(tensor.spec, tensor.first_rank) + " but " + describe(spec, rank);
      complain(text);
      // A rank that agreed before contradicts only itself: the others can still complete the tensor with it.
      if (tensor.declared_by[static_cast<std::size_t>(member)]) continue;
      tensor.failure = text;
      Conflict& conflict = result.conflicts.emplace_back(Conflict{tensor.id.id, text, {}});
      for (std::size_t i = 0; i < tensor.declared_by.size(); ++i) {
        if (tensor.declared_by[i]) conflict.ranks.push_back(entry.group.ranks[i]);
      }
      continue;
    }
    tensor.declared_by[static_cast<std::size_t>(member)] = true;
    result.ids.push_back(tensor.id);
  }
  if (problems > 1) result.problem += " (and " + std::to_string(problems - 1) + " more tensors like it)";
  return result;
}

std::string Registry::keep(std::uint32_t rank, std::uint64_t bytes, const std::string& what) {
  if (kept_[rank] + bytes <= options_.most_kept) {
    kept_[rank] += bytes;
    return "";
  }
  return what + " is one too many: what rank " + std::to_string(rank) + " was the first to declare, and the groups " +
         "that it was the first to ask for, take " + std::to_string(options_.most_kept >> 20) + " MiB of the scheduler";
}

std::uint64_t Registry::bytes_of(const std::vector<std::uint32_t>& ranks, const std::string& name) {
  return kEntryBytes + 2 * (ranks.size() * sizeof(std::uint32_t) + name.size());
}

std::uint64_t Registry::bytes_of(const Group& group, const TensorSpec& spec) const {
  return kEntryBytes + 2 * spec.name.size() + spec.shape.size() + spec.compression.size() + group.size() / 8 +
         load_.size() * sizeof(std::uint64_t);
}

void Registry::add_tensor(const Group& group, Tensor& tensor, const TensorSpec& spec, std::uint32_t rank) {
  tensor = {.spec = spec,
            .id = {free_id(spec.group, spec.name), load_for(spec)},
            .first_rank = rank,
            .declared_by = std::vector<bool>(group.size()),
            .failure = ""};
  if (!load_.empty()) place(group, spec, tensor.id.server_load);
}

const std::vector<std::uint64_t>& Registry::load_for(const TensorSpec& spec) const {
  if (!options_.before) return load_;
  const auto found = options_.before->find({spec.group, spec.name});
  const bool is_known = found != options_.before->end() && found->second.spec == spec;
  return is_known && found->second.load.size() == load_.size() ? found->second.load : load_;
}

std::shared_ptr<const Registry::Placements> Registry::placements() const {
  if (load_.empty()) return nullptr;
  auto all = std::make_shared<Placements>();
  for (const Entry& entry : groups_) {
    for (const auto& [name, tensor] : entry.tensors) {
      (*all)[{entry.group.id, name}] = {tensor.spec, tensor.id.server_load};
    }
  }
  return all->empty() ? options_.before : all;  // a view in which nothing was declared changes nothing
}

std::uint32_t Registry::free_id(std::uint32_t group, std::string_view name) {
  const std::uint64_t hash = options_.hash(group, name);
  auto id = static_cast<std::uint32_t>(hash ^ (hash >> 30)) & kIdMask;
  while (id == 0 || !tensor_ids_.insert(id).second) id = (id + 1) & kIdMask;
  return id;
}

void Registry::limit_partitions(std::uint64_t bytes) {
  if (partition_limit_ == 0 || bytes < partition_limit_) partition_limit_ = bytes;
  options_.cut.limit(partition_limit_);
}

// Places a tensor as the workers will: they start from the same load and cut it by the same rule.
void Registry::place(const Group& group, const TensorSpec& spec, const std::vector<std::uint64_t>& from) {
  const auto element = static_cast<std::uint32_t>(size_of(Dtype{spec.dtype}));
  std::vector<std::uint64_t> after = from;
  const std::vector<std::uint32_t> weights = options_.weights ? options_.weights(group) : std::vector<std::uint32_t>();
  (void)tensor::BalancedPlacement(after, options_.cut.cut(spec.count * element, element), weights);
  for (std::size_t i = 0; i < load_.size(); ++i) load_[i] += after[i] - from[i];
}

std::string Registry::check_group(const std::vector<std::uint32_t>& ranks, std::uint32_t caller) const {
  if (ranks.empty()) return "a group needs at least one rank";
  if (std::ranges::adjacent_find(ranks, std::greater_equal()) != ranks.end()) {
    return "the ranks of a group must be ascending and different, not " + name_ranks(ranks);
  }
  if (ranks.back() >= options_.workers) {
    return "rank " + std::to_string(ranks.back()) + " does not exist: the job has " + std::to_string(options_.workers) +
           (options_.workers == 1 ? " worker" : " workers");
  }
  if (!std::ranges::binary_search(ranks, caller)) {
    return "rank " + std::to_string(caller) + " is not a member of the group it asks for (" + name_ranks(ranks) + ")";
  }
  return "";
}

const Group* Registry::find_group(const std::vector<std::uint32_t>& ranks, const std::string& name) const {
  const auto found = group_ids_.find({ranks, name});
  return found == group_ids_.end() ? nullptr : &groups_[found->second].group;
}

const Group& Registry::add_group(std::vector<std::uint32_t> ranks, const std::string& name) {
  const auto id = static_cast<std::uint32_t>(groups_.size());
  group_ids_[{ranks, name}] = id;
  return groups_.emplace_back(Entry{{id, std::move(ranks)}, {}}).group;
}

const Group* Registry::group(std::uint32_t id) const {
  return id < groups_.size() ? &groups_[id].group : nullptr;
}

std::string Registry::describe_groups() const {
  std::map<std::uint32_t, std::string> names;
  for (const auto& [key, id] : group_ids_) names[id] = key.second;
  JsonList list;
  for (const Entry& entry : groups_) {
    JsonList ranks;
    for (const std::uint32_t rank : entry.group.ranks) ranks.add(rank);
    JsonObject one;
    one.add("id", entry.group.id).add("name", names[entry.group.id]).add_raw("ranks", ranks.end());
    list.add_raw(one.end());
  }
  return list.end();
}

}  // namespace bps::van
