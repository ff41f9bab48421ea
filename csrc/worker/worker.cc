// SPDX-License-Identifier: Apache-2.0
#include "worker/worker.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <thread>
#include <utility>

#include "core/log.h"
#include "tensor/unrounded.h"

namespace bps::worker {
namespace {

constexpr const char* kRaiseTimeout = "check that every rank of the group calls it, or raise BPS_TIMEOUT";
constexpr std::size_t kMostLate = 256;

}  // namespace

Worker::Worker(WorkerOptions options, van::Van& van) : options_(std::move(options)), van_(van) {
  van::Group all;
  for (std::uint32_t rank = 0; rank < van.membership().workers; ++rank) all.ranks.push_back(rank);
  groups_[0] = std::make_shared<const van::Group>(std::move(all));
}

void Worker::add_loop(WorkerLoop* worker_loop, transport::Reactor* reactor, std::span<const std::size_t> connected) {
  const std::size_t index = worker_loops_.size();
  worker_loops_.push_back({worker_loop, reactor});
  worker_loop->when_failing = [this, worker_loop](const std::shared_ptr<Operation>& operation) {
    cancel(operation, worker_loop);
  };
  connected_.resize(worker_loops_.size() * places());
  for (const std::size_t place : connected) connected_[index * places() + place] = true;
}

void Worker::cancel(const std::shared_ptr<Operation>& operation, const WorkerLoop* except) {
  note_failure(operation, "");
  for (const LoopOf& each : worker_loops_) {
    if (each.worker_loop == except) continue;
    each.reactor->loop().post([worker_loop = each.worker_loop, operation] { worker_loop->cancel(*operation); });
  }
}

void Worker::abort(const std::shared_ptr<Operation>& operation, ErrorCode code, const std::string& what,
                   const std::string& hint) {
  if (operation->fail(code, what, hint)) cancel(operation, nullptr);
}

bool Worker::end_operations(ErrorCode code, const std::string& what, const std::string& hint,
                            const Deadline& deadline) {
  for (const LoopOf& each : worker_loops_) {
    each.reactor->call(
        [&] { each.worker_loop->abort_operations([](const Operation&) { return true; }, code, what, hint); });
  }
  const auto idle = [this] {
    return std::ranges::all_of(worker_loops_, [](const LoopOf& each) {
      bool is_idle = false;
      each.reactor->call([&] { is_idle = each.worker_loop->is_idle(); });
      return is_idle;
    });
  };
  while (!idle()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the end of a job
  }
  return true;
}

void Worker::note_failure(const std::shared_ptr<Operation>& operation, const std::string& refusal) {
  const bool is_end = operation && (operation->failure()->code() == ErrorCode::kNotInitialized ||
                                    operation->failure()->code() == ErrorCode::kRoundAborted);
  {
    const std::lock_guard lock(mutex_);
    last_failed_ = operation;
    last_refusal_ = refusal;
    failed_at_ = sequence_.load();
    if (operation && operation->request.two_phase) note_incomplete(operation);
  }
  if (on_failure && !is_end) on_failure();
}

// Of deadlines that pass over and over, the last ones: another rank is not further behind than that. Of what the view's
// end has aborted, everything: its callers wait for the next view.
void Worker::note_incomplete(const std::shared_ptr<Operation>& operation) {
  switch (operation->failure()->code()) {
    case ErrorCode::kRoundAborted: return aborted_.push_back(operation);
    case ErrorCode::kTimeout: break;
    default: return;
  }
  if (late_.size() == kMostLate) late_.pop_front();
  late_.push_back(operation);
}

std::vector<std::shared_ptr<Operation>> Worker::take_incomplete() {
  const std::lock_guard lock(mutex_);
  auto taken = std::exchange(aborted_, {});
  const auto late = std::exchange(late_, {});
  taken.insert(taken.end(), late.begin(), late.end());
  return taken;
}

std::shared_ptr<Tensor> Worker::declare_like(const Tensor& like, std::uint32_t group, const std::string& name) {
  const van::TensorSpec spec{group, name, static_cast<std::uint8_t>(like.dtype), like.bytes / size_of(like.dtype),
                             like.shape};
  auto tensor = make_tensor(spec, van_.declare(std::span(&spec, 1)).front(), &like);
  const std::lock_guard lock(mutex_);
  return more_tensors_.emplace_back(std::move(tensor));
}

std::shared_ptr<Operation> Worker::resume(const std::shared_ptr<Tensor>& tensor, const Operation& suspended,
                                          std::uint32_t round, std::span<const std::uint32_t> only) {
  require_alive(*tensor, suspended.request.kind);
  auto operation = make_operation(tensor, suspended.request, round, sequence_.fetch_add(1), only);
  launch(operation, false);
  return operation;
}

// Nothing is sent of what has failed before; the servers are told to fail the round.
void Worker::refuse(const std::shared_ptr<Tensor>& tensor, const Operation& late, std::uint32_t round,
                    const std::string& why) {
  Request request = late.request;
  request.input = request.output = nullptr;
  request.input_allocation = request.output_allocation = {};
  const auto operation = make_operation(tensor, request, round, sequence_.fetch_add(1));
  (void)operation->fail(ErrorCode::kTimeout, why, kRaiseTimeout);
  launch(operation, false);
}

std::string Worker::last_failure() const {
  const std::lock_guard lock(mutex_);
  if (failed_at_ != sequence_.load()) return "";
  return last_failed_ ? last_failed_->failure()->what() : last_refusal_;
}

bool Worker::meets(std::size_t worker_loop, std::size_t worker_loops, std::size_t shard, std::size_t shards) {
  const std::size_t common = std::gcd(worker_loops, shards);
  return worker_loop % common == shard % common;
}

std::uint32_t Worker::rank() const {
  return static_cast<std::uint32_t>(van_.self().worker_rank);
}

van::Group Worker::world() const {
  return *group(0);
}

std::shared_ptr<const van::Group> Worker::group(std::uint32_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(id);
  if (found == groups_.end()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no group " + std::to_string(id),
                "make groups with new_group() in this job");
  }
  return found->second;
}

van::Group Worker::new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s) {
  van::Group group = van_.new_group(std::move(ranks), name, timeout_s);
  const std::lock_guard lock(mutex_);
  groups_.emplace(group.id, std::make_shared<const van::Group>(group));
  return group;
}

void Worker::check_same(const Tensor& known, const van::TensorSpec& spec) const {
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

std::vector<std::shared_ptr<Tensor>> Worker::declare(std::span<const van::TensorSpec> tensors) {
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
    std::shared_ptr<Tensor> made = make_tensor(unknown[i], ids[i]);
    const std::lock_guard lock(mutex_);
    // Two threads, or one list, may declare the same name: the first one counts.
    const auto [place, fresh] = tensors_.try_emplace({unknown[i].group, unknown[i].name}, std::move(made));
    if (!fresh) check_same(*place->second, unknown[i]);
    // The scheduler may have learnt of a disagreement while its first answer was on the way to us.
    if (const auto bad = failed_.find(ids[i].id); bad != failed_.end()) mark_failed(*place->second, bad->second);
    result[places[i]] = place->second;
  }
  return result;
}

void Worker::check_compression(const van::TensorSpec& spec) const {
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
  if (static_cast<Dtype>(spec.dtype) != Dtype::kFloat32) {
    throw Error(ErrorCode::kInvalidArgument,
                "'" + spec.name + "' is " + std::string(to_string(static_cast<Dtype>(spec.dtype))) +
                    ", and only float32 can be compressed",
                "send it without compression, or convert it");
  }
}

std::shared_ptr<Tensor> Worker::make_tensor(const van::TensorSpec& spec, const van::TensorId& id, const Tensor* like) {
  const auto dtype = static_cast<Dtype>(spec.dtype);
  const auto element = static_cast<std::uint32_t>(size_of(dtype));
  const std::uint64_t bytes = spec.count * element;
  const auto members = group(spec.group);
  const std::int32_t member = members->index_of(rank());
  if (member == van::kNoRank) {
    throw Error(ErrorCode::kInvalidArgument, "this rank is not in the group of '" + spec.name + "'",
                "call operations of a group on its ranks only");
  }
  const Exactness exactness = exactness_of(spec.compression, dtype);
  tensor::CutRule rule = options_.cut;
  if (exactness != Exactness::kNone && options_.hosts.active()) {  // what a host has summed is longer
    rule.limit(std::max<std::uint64_t>(tensor::most_unrounded_elements(dtype, rule.partition_bytes), 1) * element);
  }
  auto tensor = std::make_shared<Tensor>(like != nullptr ? like->whole : rule.cut(bytes, element),
                                         like != nullptr ? like->sharded : rule.cut(bytes, element, members->size()));
  tensor->view_ended = view_ended_;
  tensor->recorder = recorder_;
  tensor->is_timed = options_.times_operations;
  if (options_.trace != nullptr) options_.trace->name_tensor(id.id, spec.name);
  tensor->name = spec.name;
  tensor->id = id.id;
  tensor->group = members;
  tensor->member = static_cast<std::uint16_t>(member);
  tensor->dtype = dtype;
  tensor->bytes = bytes;
  tensor->shape = spec.shape;
  tensor->compression = spec.compression;
  tensor->exactness = exactness;
  if (!spec.compression.empty() && !names_exactness(spec.compression)) {
    tensor->compressor = std::make_unique<Compressor>(compress::parse_compression(spec.compression), spec.count,
                                                      std::max(tensor->whole.count(), tensor->sharded.count()));
    for (const LoopOf& each : worker_loops_) {
      each.reactor->call([&] { each.worker_loop->add_compressed(tensor); });
    }
  }
  if (!id.server_load.empty() && id.server_load.size() != slots()) {
    throw Error(ErrorCode::kInternal, "the scheduler has told the load of another number of servers",
                "report this as a bug");
  }
  tensor->whole_plan = plan(*tensor, tensor->whole, false, id.server_load);
  tensor->sharded_plan = plan(*tensor, tensor->sharded, true, id.server_load);
  connect(tensor->whole_plan);
  connect(tensor->sharded_plan);
  return tensor;
}

std::size_t Worker::slots() const {
  return options_.key_map.slots.empty() ? options_.key_map.servers : options_.key_map.slots.size();
}

std::vector<std::uint32_t> Worker::servers_of(const Tensor& tensor) const {
  std::vector<std::uint32_t> servers(tensor.whole.count());
  for (std::size_t i = 0; i < tensor.whole_plan.size(); ++i) {
    for (const Part& part : tensor.whole_plan[i]) {
      const std::size_t place = part.for_host() ? part.place : i % places();
      servers[part.partition] = static_cast<std::uint32_t>(place / options_.loops_per_server);
    }
  }
  return servers;
}

std::size_t Worker::places() const {
  const std::size_t servers = options_.key_map.servers * options_.loops_per_server;
  if (!options_.hosts.active() || !options_.own_server.empty()) return servers;
  return servers + options_.hosts.ranks(options_.hosts.host_of(rank())).size();
}

std::size_t Worker::place_of_relay(std::uint32_t worker_rank, std::size_t worker_loop) const {
  const std::size_t shards = options_.loops_per_server;
  if (!options_.own_server.empty()) return options_.own_server[worker_rank] * shards + worker_loop;
  return options_.key_map.servers * shards + options_.hosts.local_index(worker_rank);
}

std::vector<std::size_t> Worker::places_needed(std::size_t worker_loop, std::size_t worker_loops) const {
  const std::size_t shards = options_.loops_per_server;
  const van::Hosts& hosts = options_.hosts;
  std::vector<bool> needed(places());
  for (std::uint32_t server = 0; server < options_.key_map.servers; ++server) {
    const bool direct = !hosts.active() || !needs_relay(*group(0), server) || hosts.relays(rank(), server);
    for (std::size_t shard = 0; direct && shard < shards; ++shard) {
      if (meets(worker_loop, worker_loops, shard, shards)) needed[server * shards + shard] = true;
    }
  }
  if (hosts.active()) {
    for (const std::uint32_t local : hosts.ranks(hosts.host_of(rank()))) {
      needed[place_of_relay(local, worker_loop)] = true;
    }
  }
  std::vector<std::size_t> list;
  for (std::size_t place = 0; place < needed.size(); ++place) {
    if (needed[place]) list.push_back(place);
  }
  return list;
}

// Whether a rank's pushes to a server go by its host's relay: the host has others to sum with, or the group need not
// leave the host at all.
bool Worker::needs_relay(const van::Group& group, std::uint32_t server) const {
  const van::Hosts& hosts = options_.hosts;
  if (!hosts.active()) return false;
  const std::uint32_t here = hosts.host_of(rank());
  if (van::hosts_of(group, hosts) == 1) return hosts.host_of_server(server) != here;
  return std::ranges::count(group.ranks, here, [&](std::uint32_t member) { return hosts.host_of(member); }) > 1;
}

Plan Worker::plan(const Tensor& tensor, const tensor::Partitioning& cut, bool own_shards,
                  std::span<const std::uint64_t> load) const {
  const std::size_t shards = options_.loops_per_server;
  const std::size_t width = places();
  Plan plan(worker_loops_.size() * width);
  std::vector<std::uint64_t> balance(load.begin(), load.end());
  const tensor::BalancedPlacement balanced(balance, cut);
  std::vector<bool> by_relay(options_.key_map.servers);
  for (std::uint32_t server = 0; server < by_relay.size(); ++server) {
    by_relay[server] = needs_relay(*tensor.group, server);
  }
  for (std::uint32_t i = 0; i < cut.count(); ++i) {
    const tensor::Partitioning::Piece piece = cut.piece(i);
    std::uint32_t server;
    if (own_shards && !options_.own_server.empty()) {
      server = options_.own_server[tensor.group->ranks[piece.shard]];
    } else if (!load.empty()) {
      server = tensor::owner_of(options_.key_map, balanced.slot(i), tensor.id, i);
    } else {
      server = tensor::server_of(options_.key_map, tensor.id, i);
    }
    const std::uint32_t spread = tensor::spread_of(tensor.id, i);
    const std::size_t worker_loop = spread % worker_loops_.size();
    const std::size_t place = server * shards + spread % shards;
    if (by_relay[server]) {
      const std::uint32_t relay =
          options_.hosts.relay(options_.hosts.host_of(rank()), server, tensor::relay_hash(spread));
      plan[worker_loop * width + place_of_relay(relay, worker_loop)].push_back({i, static_cast<std::uint32_t>(place)});
    } else {
      plan[worker_loop * width + place].push_back({i});
    }
  }
  return plan;
}

void Worker::connect(const Plan& plan) {
  if (!options_.hosts.active()) return;  // every connection is there
  const std::lock_guard lock(connecting_);
  const std::size_t width = places();
  for (std::size_t i = 0; i < plan.size(); ++i) {
    if (plan[i].empty() || connected_[i]) continue;
    connect_(i / width, i % width);
    connected_[i] = true;
  }
}

// Whether the loss of a member keeps the group from summing: it belongs to it, sums for it, or may be the relay of
// ranks that do.
bool Worker::concerns(const van::Node& gone, const van::Group& group) const {
  if (gone.server_rank >= 0) return true;
  const auto rank = static_cast<std::uint32_t>(gone.worker_rank);
  if (!options_.hosts.active()) return group.index_of(rank) != van::kNoRank;
  const std::uint32_t host = options_.hosts.host_of(rank);
  return std::ranges::any_of(group.ranks, [&](std::uint32_t member) { return options_.hosts.host_of(member) == host; });
}

void Worker::check_alive(const Tensor& tensor, tensor::OperationKind kind) const {
  if (tensor.failed.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kMismatch, tensor.why_failed, "declare the tensor with the same dtype and shape everywhere");
  }
  if (!any_lost_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  if (why_view_ended_) throw Error(*why_view_ended_);
  for (const auto& [node, what] : lost_) {
    const van::Node* gone = van_.membership().by_id(node);
    if (gone == nullptr || concerns(*gone, *tensor.group))
      throw Error(ErrorCode::kPeerLost, "'" + tensor.name + "' cannot be synchronised: " + what, kRestartJob);
  }
  // A member may have pushed its part before it left: a push or pull on its own can still succeed.
  if (kind == tensor::OperationKind::kSplit) return;
  for (const auto& [node, what] : left_) {
    const auto rank = static_cast<std::uint32_t>(van_.membership().by_id(node)->worker_rank);
    if (tensor.group->index_of(rank) != van::kNoRank) {
      throw Error(ErrorCode::kPeerLost, "'" + tensor.name + "' cannot be synchronised: " + what, kRestartJob);
    }
  }
}

void Worker::require_alive(const Tensor& tensor, tensor::OperationKind kind) {
  try {
    check_alive(tensor, kind);
  } catch (const Error& error) {
    note_failure(nullptr, error.what());
    throw;
  }
}

// The tensor in the group of this rank alone: with the same id and partitions, but rounds of its own.
std::shared_ptr<Tensor> Worker::alone(Tensor& tensor) {
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
    made.whole_plan = tensor.whole_plan;
    made.view_ended = tensor.view_ended;
    made.recorder = tensor.recorder;
    made.is_timed = tensor.is_timed;
  }
  if (tensor.failed) mark_failed(*tensor.alone, tensor.why_failed);
  return tensor.alone;
}

void Worker::require_direct() const {
  if (options_.hosts.active()) {
    throw Error(ErrorCode::kInvalidArgument, "the ranks of each host sum first, and no rank can add to weights alone",
                "set BPS_ASYNC=1, or BPS_HOST_SUM=0, in all processes of the job");
  }
}

std::shared_ptr<Operation> Worker::start(const std::shared_ptr<Tensor>& whose, const Request& request) {
  const bool is_stored = request.kind >= tensor::OperationKind::kStore && !tensor::is_feedback(request.kind);
  if (is_stored) require_direct();
  const auto tensor = request.kind == tensor::OperationKind::kAccumulate ? alone(*whose) : whose;
  require_alive(*tensor, request.kind);
  const std::uint32_t round = next_round(*tensor, request);
  Request what = request;
  if (what.kind == tensor::OperationKind::kAccumulate) count_tries(*tensor, what, round);
  auto operation = make_operation(tensor, what, round, sequence_.fetch_add(1));
  launch(operation, request.awaited);
  return operation;
}

// What is sent again names the round in which it was sent first.
void Worker::count_tries(Tensor& tensor, Request& request, std::uint32_t round) {
  if (!request.again) tensor.latest.store(round);
  const std::uint32_t tries = round - tensor.latest.load();
  if (tries > std::numeric_limits<std::uint16_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, "'" + tensor.name + "' was sent too often without success",
                "call store() again, on every rank");
  }
  request.addition.tries = static_cast<std::uint16_t>(tries);
}

std::uint32_t Worker::next_round(Tensor& tensor, const Request& request) {
  if (tensor::is_feedback(request.kind) && !tensor.compressor) {
    throw Error(ErrorCode::kInvalidArgument, "'" + tensor.name + "' is not compressed: nothing of it is fed back",
                "declare it with a compression");
  }
  const bool feeds = tensor::is_feedback(request.kind);  // of push_pull
  if (tensor.compressor && (feeds || Compressor::applies(request.kind, request.op)) &&
      !tensor.compressor->bind(feeds ? tensor::OperationKind::kPushPull : request.kind)) {
    throw Error(ErrorCode::kInvalidArgument,
                "'" + tensor.name + "' is compressed, and was used with another kind of operation before",
                "use names of their own for push_pull and reduce_scatter");
  }
  const bool split = request.kind == tensor::OperationKind::kSplit;
  if (split && request.pulls) return tensor.next_pull.fetch_add(1);
  const std::uint32_t round = tensor.next_round.fetch_add(1);
  if (!split) tensor.next_pull.store(round + 1);
  return round;
}

std::shared_ptr<Operation> Worker::make_operation(const std::shared_ptr<Tensor>& tensor, const Request& request,
                                                  std::uint32_t round, std::uint64_t sequence,
                                                  std::span<const std::uint32_t> only) const {
  Request what = request;
  what.op = exact_op(what.op, what.kind, tensor->exactness);
  const bool is_compressed = tensor->compressor && Compressor::applies(what.kind, what.op);
  what.two_phase &= options_.two_phase && what.kind < tensor::OperationKind::kSplit && !is_compressed;
  if (options_.two_phase && request.two_phase && !what.two_phase) has_one_phase_.store(true);
  auto operation = std::make_shared<Operation>(tensor, what, round, sequence, worker_loops_.size(), places(), only);
  if (worker_loops_.size() == 1) operation->progress = worker_loops_.front().reactor->progress();
  return operation;
}

void Worker::launch(const std::shared_ptr<Operation>& operation, bool awaited) {
  submit(operation);
  if (!awaited || !operation->progress) {
    for (const LoopOf& worker_loop : worker_loops_) worker_loop.reactor->progress()->wake();
  }
  const Tensor& tensor = *operation->tensor;
  if (any_lost_.load() || tensor.failed.load()) {  // between the check and the submission
    try {
      check_alive(tensor, operation->request.kind);
    } catch (const Error& error) {
      abort(operation, error.code(), error.what(), error.hint());
    }
  }
}

// The worker loops share the work. The first to get it also watches its deadline, and keeps it alive.
void Worker::submit(const std::shared_ptr<Operation>& operation) {
  const std::size_t loops = worker_loops_.size();
  const std::size_t first = operation->sequence % loops;
  worker_loops_[first].worker_loop->submit(operation, true);
  for (std::size_t i = 0; i < loops; ++i) {
    if (i == first) continue;
    try {
      worker_loops_[i].worker_loop->submit(operation, false);
    } catch (const Error& error) {
      // Others work on it already. These loops cancel their parts without having admitted it; their share ends here.
      std::uint64_t unreached = 0;
      for (std::size_t left = i; left < loops; ++left) unreached += left == first ? 0 : 1;
      abort(operation, error.code(), error.what(), error.hint());
      transport::Reactor& reactor = *worker_loops_[first].reactor;
      reactor.loop().post([operation, unreached, &reactor] { finish(*operation, unreached, reactor.counters()); });
      return;
    }
  }
}

void Worker::end_view(const Error& why) {
  {
    const std::lock_guard lock(mutex_);
    if (why_view_ended_) return;
    why_view_ended_ = why;
  }
  *view_ended_ = true;
  any_lost_.store(true);
  for (const LoopOf& each : worker_loops_) {
    each.reactor->loop().post([worker_loop = each.worker_loop, why] { worker_loop->end_view(why); });
  }
}

void Worker::lose_node(std::uint32_t node, const std::string& why) {
  const van::Node* gone = van_.membership().by_id(node);
  {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(lost_, node, [](const auto& one) { return one.first; }) != lost_.end()) return;
    lost_.emplace_back(node, why);
  }
  any_lost_.store(true);
  for (const LoopOf& worker_loop : worker_loops_) {
    worker_loop.reactor->loop().post([this, worker_loop = worker_loop.worker_loop, gone, node, why] {
      worker_loop->abort_operations(
          [&](const Operation& operation) { return gone == nullptr || concerns(*gone, *operation.tensor->group); },
          ErrorCode::kPeerLost, why, kRestartJob);
      worker_loop->lose_server(node, why);
    });
  }
}

// Answers to what that member has contributed to are on their way.
// What becomes of operations in progress the servers decide, who know what that member has contributed to.
void Worker::leave_node(std::uint32_t node, const std::string& why) {
  const std::lock_guard lock(mutex_);
  left_.emplace_back(node, why);
  any_lost_.store(true);
}

void Worker::on_reachable(std::uint32_t node) {
  for (const LoopOf& each : worker_loops_) {
    each.reactor->loop().post([worker_loop = each.worker_loop, node] { worker_loop->on_reachable(node); });
  }
}

void Worker::mark_failed(Tensor& tensor, const std::string& why) {
  if (tensor.failed) return;
  tensor.why_failed = why;
  tensor.failed.store(true);
}

void Worker::fail_tensor(std::uint32_t id, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    failed_.emplace(id, why);
    for (const auto& [key, tensor] : tensors_) {
      if (tensor->id == id) mark_failed(*tensor, why);
    }
  }
  for (const LoopOf& worker_loop : worker_loops_) {
    worker_loop.reactor->loop().post([worker_loop = worker_loop.worker_loop, id, why] {
      worker_loop->abort_operations([&](const Operation& operation) { return operation.tensor->id == id; },
                                    ErrorCode::kMismatch, why,
                                    "declare the tensor with the same dtype and shape everywhere");
    });
  }
}

void Worker::forget_memory(std::uint64_t identity) {
  for (const LoopOf& worker_loop : worker_loops_) {
    worker_loop.reactor->loop().post(
        [worker_loop = worker_loop.worker_loop, identity] { worker_loop->forget_memory(identity); });
  }
}

}  // namespace bps::worker
