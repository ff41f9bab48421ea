// SPDX-License-Identifier: Apache-2.0
#include "worker/declarations.h"

#include <algorithm>
#include <utility>

#include "compress/label.h"
#include "tensor/unrounded.h"
#include "worker/pace.h"

namespace bps::worker {
namespace {

void check_same(const Tensor& known, const van::TensorSpec& spec) {
  const std::uint64_t bytes = spec.count * size_of(static_cast<Dtype>(spec.dtype));
  if (known.dtype == static_cast<Dtype>(spec.dtype) && known.bytes == bytes) {
    if (known.compression == spec.compression) return;
    const auto in_words = [](const std::string& text) { return text.empty() ? "none" : "'" + text + "'"; };
    throw Error(ErrorCode::kMismatch,
                "the name '" + spec.name + "' was used with the compression " + in_words(known.compression) +
                    " and is used again with " + in_words(spec.compression),
                "use one compression per name, or another name");
  }
  throw Error(ErrorCode::kMismatch,
              "the name '" + spec.name + "' stands for a tensor of " + std::string(to_string(known.dtype)) + " " +
                  known.shape + " and is used again with " + std::string(to_string(static_cast<Dtype>(spec.dtype))) +
                  " " + spec.shape,
              "use one name per tensor, or another name for another shape");
}

// The caller must hold the mutex.
void mark_failed(Tensor& tensor, const std::string& why) {
  if (tensor.failed) return;
  tensor.why_failed = why;
  tensor.failed.store(true);
}

}  // namespace

Declarations::Declarations(const WorkerOptions& options, van::Van& van, Planner& planner,
                           const std::vector<WorkerLoop*>& worker_loops, std::shared_ptr<FlightRecorder> recorder,
                           std::shared_ptr<ViewEnd> view_end)
    : options_(options),
      van_(van),
      planner_(planner),
      worker_loops_(worker_loops),
      recorder_(std::move(recorder)),
      view_end_(std::move(view_end)) {
  van::Group all;
  for (std::uint32_t rank = 0; rank < van.membership().workers; ++rank) all.ranks.push_back(rank);
  groups_[0] = std::make_shared<const van::Group>(std::move(all));
}

std::shared_ptr<Tensor> Declarations::declare_like(const Tensor& like, std::uint32_t group, const std::string& name) {
  const van::TensorSpec spec{group, name, static_cast<std::uint8_t>(like.dtype), like.bytes / size_of(like.dtype),
                             like.shape};
  auto tensor = make(spec, van_.declare(std::span(&spec, 1)).front(), &like);
  const std::lock_guard lock(mutex_);
  return more_tensors_.emplace_back(std::move(tensor));
}

std::uint32_t Declarations::rank() const {
  return static_cast<std::uint32_t>(van_.self().worker_rank);
}

van::Group Declarations::world() const {
  return *group(0);
}

std::shared_ptr<const van::Group> Declarations::group(std::uint32_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(id);
  if (found == groups_.end()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no group " + std::to_string(id),
                "make groups with new_group() in this job");
  }
  return found->second;
}

van::Group Declarations::new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s) {
  van::Group group = van_.new_group(std::move(ranks), name, timeout_s);
  const std::lock_guard lock(mutex_);
  groups_.emplace(group.id, std::make_shared<const van::Group>(group));
  return group;
}

std::vector<std::shared_ptr<Tensor>> Declarations::declare(std::span<const van::TensorSpec> tensors) {
  std::vector<std::shared_ptr<Tensor>> result(tensors.size());
  std::vector<van::TensorSpec> unknown;
  std::vector<std::size_t> places;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto found = tensors_.find({tensors[i].group, tensors[i].name});
      if (found != tensors_.end()) {
        check_same(*found->second, tensors[i]);
        result[i] = found->second;
      } else {
        check_compression(tensors[i]);
        unknown.push_back(tensors[i]);
        places.push_back(i);
      }
    }
  }
  if (unknown.empty()) return result;
  const std::vector<van::TensorId> ids = van_.declare(unknown);
  for (std::size_t i = 0; i < unknown.size(); ++i) {
    std::shared_ptr<Tensor> made = make(unknown[i], ids[i]);
    const std::lock_guard lock(mutex_);
    // Two threads, or one list, may declare the same name. The first one counts.
    const auto [place, fresh] = tensors_.try_emplace({unknown[i].group, unknown[i].name}, std::move(made));
    if (!fresh) check_same(*place->second, unknown[i]);
    // The scheduler may have learnt of a disagreement while its first answer was on the way to us.
    if (const auto bad = mismatched_.find(ids[i].id); bad != mismatched_.end())
      mark_failed(*place->second, bad->second);
    result[places[i]] = place->second;
  }
  return result;
}

void Declarations::check_compression(const van::TensorSpec& spec) const {
  if (spec.compression.empty()) return;
  if (names_exactness(spec.compression)) {
    if (spec.compression == kExact || static_cast<Dtype>(spec.dtype) == Dtype::kFloat64) return;
    throw Error(ErrorCode::kInvalidArgument, "'" + spec.name + "' is not float64, and is to be rounded to odd",
                "pass exact=True");
  }
  const auto compression = compress::parse_compression(spec.compression);
  if (!compression->codec->is_built_in()) {
    for (const van::Node& node : van_.membership().nodes) {
      if (node.server_rank < 0 || node.worker_rank >= 0) continue;
      throw Error(ErrorCode::kInvalidArgument,
                  node.describe() + " cannot sum '" + spec.name + "': the method of '" + spec.compression +
                      "' was added to the workers, and servers by themselves do not have it",
                  "use a method that is built in, or no dedicated servers");
    }
  }
  const auto dtype = static_cast<Dtype>(spec.dtype);
  if (!is_compressible(dtype)) {
    throw Error(ErrorCode::kInvalidArgument,
                "'" + spec.name + "' is " + std::string(to_string(dtype)) +
                    ", and only float32, float16 and bfloat16 can be compressed",
                "send it without compression, or convert it");
  }
  const auto element = static_cast<std::uint32_t>(size_of(dtype));
  const tensor::Partitioning cut = options_.cut.for_float32(element).cut(spec.count * element, element);
  if (cut.count() == 0) return;
  const std::uint64_t partition = cut.piece(0).length;
  const std::uint64_t payload = compress::kLabelBytes + compression->codec->encoded_size(partition / element);
  if (!compress::stands_for_too_much(partition, payload)) return;
  throw Error(ErrorCode::kInvalidArgument,
              "'" + spec.name + "' cannot be compressed by '" + spec.compression + "': servers take no partition of " +
                  std::to_string(partition) + " bytes in " + std::to_string(payload) + ", which is less than one in " +
                  std::to_string(compress::kMostRatio),
              "send more of it (k), or set BPS_PARTITION_BYTES to " + std::to_string(compress::kMostFree) + " or less");
}

std::shared_ptr<Tensor> Declarations::make(const van::TensorSpec& spec, const van::TensorId& id, const Tensor* like) {
  const auto dtype = static_cast<Dtype>(spec.dtype);
  const auto element = static_cast<std::uint32_t>(size_of(dtype));
  const std::uint64_t bytes = spec.count * element;
  const auto members = group(spec.group);
  const std::int32_t position = members->index_of(rank());
  if (position == van::kNoRank) {
    throw Error(ErrorCode::kInvalidArgument, "this rank is not in the group of '" + spec.name + "'",
                "call operations of a group on its ranks only");
  }
  const Exactness exactness = exactness_of(spec.compression, dtype);
  const bool is_compressed = !spec.compression.empty() && !names_exactness(spec.compression);
  tensor::CutRule rule = is_compressed ? options_.cut.for_float32(element) : options_.cut;
  if (exactness != Exactness::kNone && options_.hosts.active()) {  // what a host has summed is longer
    rule.limit(std::max<std::uint64_t>(tensor::most_unrounded_elements(dtype, rule.partition_bytes), 1) * element);
  }
  auto tensor = std::make_shared<Tensor>(like != nullptr ? like->whole : rule.cut(bytes, element),
                                         like != nullptr ? like->sharded : rule.cut(bytes, element, members->size()));
  tensor->view_end = view_end_;
  tensor->recorder = recorder_;
  tensor->is_timed = options_.times_operations;
  tensor->ahead = Pace::each_of(options_.cut.partition_bytes);
  if (options_.trace != nullptr) options_.trace->name_tensor(id.id, spec.name);
  tensor->name = spec.name;
  tensor->id = id.id;
  tensor->group = members;
  tensor->position = static_cast<std::uint16_t>(position);
  tensor->is_on_one_host =
      (options_.survives_servers || options_.hosts.active()) && van::hosts_of(*members, options_.hosts) == 1;
  tensor->dtype = dtype;
  tensor->bytes = bytes;
  tensor->shape = spec.shape;
  tensor->compression = spec.compression;
  tensor->exactness = exactness;
  if (is_compressed) {
    tensor->compressor =
        std::make_unique<Compressor>(compress::parse_compression(spec.compression), dtype, spec.count, tensor->whole,
                                     std::max(tensor->whole.count(), tensor->sharded.count()));
    tensor->fed_back = tensor->whole.with_elements_of(element, sizeof(float));
    tensor->compressor->make_scratch();  // callers drive loops, too
    bool uses_network = false;
    for (WorkerLoop* each : worker_loops_) {
      each->reactor().call([&] {
        tensor->compressor->make_scratch();
        each->add_compressed(tensor);
        uses_network |= each->uses_network();
      });
    }
    const van::Membership& all = van_.membership();
    const auto is_elsewhere = [&](const van::Node& node) { return node.host_key != van_.self().host_key; };
    tensor->stays_on_host =
        !uses_network && !tensor->compressor->compression().everywhere && std::ranges::none_of(all.nodes, is_elsewhere);
  }
  if (!id.server_load.empty() && id.server_load.size() != planner_.places().slots()) {
    throw Error(ErrorCode::kInternal, "the scheduler has told the load of another number of servers",
                "report this as a bug");
  }
  tensor->plans = planner_.make(*tensor, planner_.places(), id.server_load);
  if (is_compressed && tensor->compressor->remembers()) note_encoded(*tensor);
  const auto needs_no_server = [](const auto& parts) { return std::ranges::any_of(parts, &Part::for_host); };
  if (tensor->is_on_one_host && std::ranges::any_of(tensor->plans.whole, needs_no_server)) tensor->stays_on_host = true;
  return tensor;
}

// Notes which partitions of push_pulls this rank encodes, for itself or for its host: it alone may remember something
// of these.
void Declarations::note_encoded(Tensor& tensor) const {
  tensor.encoded.resize(tensor.whole.count());
  if (!tensor.compressor->shortens()) return;
  const Places& places = planner_.places();
  for (std::size_t loop = 0; loop < worker_loops_.size(); ++loop) {
    WorkerLoop& sender = *worker_loops_[loop];
    sender.reactor().call([&] {
      for (std::size_t place = 0; place < places.count(); ++place) {
        for (const Part& part : tensor.plans.whole[loop * places.count() + place]) {
          if (part.for_host() && !places.is_own_relay(place, loop)) continue;
          tensor.encoded[part.partition] = sender.compresses_to(part.for_host() ? part.place : place, tensor) &&
                                           tensor.compressor->is_shorter(tensor.whole.piece(part.partition).length);
        }
      }
    });
  }
}

std::vector<std::shared_ptr<Tensor>> Declarations::all() const {
  std::vector<std::shared_ptr<Tensor>> result;
  const std::lock_guard lock(mutex_);
  result.reserve(tensors_.size());
  for (const auto& [key, tensor] : tensors_) result.push_back(tensor);
  return result;
}

void Declarations::fail(std::uint32_t id, const std::string& why) {
  const std::lock_guard lock(mutex_);
  mismatched_.emplace(id, why);
  for (const auto& [key, tensor] : tensors_) {
    if (tensor->id == id) mark_failed(*tensor, why);
  }
}

std::shared_ptr<Tensor> Declarations::alone(Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (tensor.alone == nullptr) {
    tensor.alone = std::make_shared<Tensor>(tensor.whole, tensor.sharded);
    Tensor& made = *tensor.alone;
    made.name = tensor.name;
    made.id = tensor.id;
    made.group = std::make_shared<const van::Group>(van::Group{tensor::kAlone | rank(), {rank()}});
    made.stored_by = tensor.group->id;
    made.dtype = tensor.dtype;
    made.bytes = tensor.bytes;
    made.shape = tensor.shape;
    made.plans.whole = tensor.plans.whole;
    made.view_end = tensor.view_end;
    made.recorder = tensor.recorder;
    made.is_timed = tensor.is_timed;
  }
  if (tensor.failed) mark_failed(*tensor.alone, tensor.why_failed);
  return tensor.alone;
}

}  // namespace bps::worker
