// SPDX-License-Identifier: Apache-2.0
#include "worker/operation.h"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>

namespace bps::worker {
namespace {

constexpr const char* kNames[] = {"push_pull", "reduce_scatter", "all_gather",       "broadcast",        "push or pull",
                                  "store",     "accumulate",     "read of feedback", "write of feedback"};

long futex(const std::atomic<std::uint32_t>* word, int what, std::uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, word, what | FUTEX_PRIVATE_FLAG, value, timeout, nullptr, 0);
}

Plan select(const Plan& all, std::span<const Operation::Begun> only) {
  Plan some(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::ranges::copy_if(all[i], std::back_inserter(some[i]), [&](const Part& part) {
      return std::ranges::binary_search(only, part.partition, {}, &Operation::Begun::partition);
    });
  }
  return some;
}

// All of a result, but for its first bytes, which are there already.
void copy_result(const tensor::Placement& placement, std::uint64_t first, const std::byte* from, std::byte* output) {
  std::memcpy(output + placement.output_offset + first, from + first, placement.length - first);
}

}  // namespace

const char* name_of(tensor::OperationKind kind) {
  return kNames[static_cast<std::size_t>(kind)];
}

Operation::Operation(std::shared_ptr<Tensor> of, const Request& what, std::uint32_t of_round, std::uint64_t order,
                     std::size_t worker_loops, std::size_t places, std::span<const Begun> only, Clock::time_point now)
    : tensor(std::move(of)),
      request(what),
      round(of_round),
      sequence(order),
      deadline(Deadline::after(what.timeout_s, now)),
      placed{what.kind, what.pushes, tensor->member, what.root},
      cut_(tensor::is_sharded(what.kind) ? &tensor->sharded : &tensor->whole),
      header_(make_header()),
      special_(static_cast<std::uint8_t>((tensor->is_timed ? kTimed : 0) | (only.empty() ? 0 : kContinuation))) {
  const auto& all = tensor::is_sharded(what.kind) ? tensor->sharded_plan : tensor->whole_plan;
  if (!only.empty()) {
    suspension().plan = select(all, only);
    suspension().begun.assign(only.begin(), only.end());
  }
  const Plan& plan = only.empty() ? all : suspension_->plan;
  portions.resize(worker_loops * places);
  std::uint64_t partitions = 0;
  for (std::size_t i = 0; i < portions.size(); ++i) {
    Portion& portion = portions[i];
    portion.operation = this;
    portion.header = &header_;
    portion.parts = plan[i];
    portion.priority = what.priority;
    portion.input_bytes = what.input;
    portion.output_bytes = what.output;
    portion.finality = what.two_phase ? Finality::kCommit : Finality::kAnswer;  // until its loop admits it
    partitions += start(portion);
  }
  // Each worker loop finishes one more when it has taken the operation in: so it cannot complete while a worker loop
  // still looks.
  remaining.store(partitions + worker_loops, std::memory_order_relaxed);
  record(now);
}

// Answers how many partitions it has.
std::uint64_t Operation::start(Portion& portion) const {
  portion.unfinished = static_cast<std::uint32_t>(portion.parts.size());
  portion.sequence = sequence;
  return portion.parts.size();
}

// A loop that still has the operation on its list of deadlines may look at it meanwhile: it leaves alone what is over,
// and so finds either that or the new round.
bool Operation::rearm(std::uint32_t new_round, std::uint64_t order) {
  if (!over() || is_incomplete() || is_failing() || is_given_up()) return false;
  if (const int fd = completion_fd_.load(); fd >= 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto n = ::read(fd, &count, sizeof count);  // not readable any more
  }
  round = new_round;
  sequence = order;
  const auto now = Clock::now();
  deadline = Deadline::after(request.timeout_s, now);
  header_.round = new_round;
  std::uint64_t partitions = 0;
  for (Portion& portion : portions) {
    portion.next = 0;
    partitions += start(portion);
  }
  remaining.store(partitions + 1, std::memory_order_relaxed);
  record(now);
  state_.store(kPending, std::memory_order_release);
  over_.store(false, std::memory_order_release);
  return true;
}

Operation::~Operation() {
  if (const int fd = completion_fd_.load(); fd >= 0) ::close(fd);
}

bool Operation::wait(const Deadline& until) const {
  while (!done()) {
    const int left = until.left_ms();
    if (left == 0) break;
    (void)wait_briefly(left);
  }
  return done();
}

bool Operation::wait_briefly(int milliseconds) const {
  if (done()) return true;
  if (progress) {
    using Outcome = transport::ProgressLock::Outcome;
    const Outcome outcome =
        progress->progress_until([this] { return done(); }, std::chrono::milliseconds(milliseconds));
    if (outcome != Outcome::kElsewhere) return outcome == Outcome::kDone;
  }
  sleepers_.fetch_add(1);
  if (!done()) {
    const timespec timeout{.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1'000'000L};
    futex(&state_, FUTEX_WAIT, kPending, &timeout);
  }
  sleepers_.fetch_sub(1);
  return done();
}

std::int64_t Operation::age_ms() const {
  if (recorded_at_ == Clock::time_point{}) return 0;
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - recorded_at_).count();
}

void Operation::record(Clock::time_point now) {
  if (!tensor->recorder) return;
  recorded_ = tensor->recorder->begin(sequence, *tensor, request.kind, round, now);
  recorded_at_ = now;
}

void Operation::settle(State state) {
  if (recorded_ != nullptr) {
    using End = FlightRecorder::End;
    FlightRecorder::end(*recorded_, sequence, state == kDone ? End::kDone : End::kFailed, Clock::now() - recorded_at_);
  }
  std::uint32_t expected = kPending;
  if (!state_.compare_exchange_strong(expected, state)) return;
  if (sleepers_.load() > 0) futex(&state_, FUTEX_WAKE, INT_MAX, nullptr);
  if (progress) progress->call_back();
  if (const int fd = completion_fd_.load(); fd >= 0) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(fd, &one, sizeof one);
  }
}

int Operation::completion_fd() {
  int fd = completion_fd_.load();
  if (fd >= 0) return fd;
  const int made = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (made < 0) throw_errno("cannot create an eventfd");
  if (!completion_fd_.compare_exchange_strong(fd, made)) {
    ::close(made);
    return fd;
  }
  if (done()) {  // it may have settled before it could see the descriptor
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(made, &one, sizeof one);
  }
  return made;
}

void Operation::end() {
  if (is_incomplete()) {
    if ((special_.load(std::memory_order_relaxed) & kGivenBack) != 0) {
      (void)fail(ErrorCode::kInvalidArgument, "the memory of its result was given back before it was complete",
                 "wait for an operation before you free, resize or unmap its array");
    }
    (void)fail(ErrorCode::kInternal, "a part of it ended without a reason", "report this as a bug");
  }
  settle(is_incomplete() ? kFailed : kDone);
  over_.store(true, std::memory_order_release);
}

bool Operation::fail(ErrorCode code, const std::string& what, const std::string& hint) {
  const std::lock_guard lock(error_mutex_);
  if (done() || error_) return false;
  error_.emplace(code, describe() + ": " + what, hint);
  if (tensor->compressor) tensor->compressor->note_failure();
  if (code == ErrorCode::kRoundAborted && tensor->view_ended) *tensor->view_ended = true;
  failing_.store(true, std::memory_order_release);
  return true;
}

bool Operation::is_suspended() const {
  if (!request.two_phase || state_.load(std::memory_order_acquire) != kFailed) return false;
  const std::lock_guard lock(error_mutex_);
  if (!error_) return false;
  if (error_->code() == ErrorCode::kRoundAborted) return true;
  const bool is_known = suspension_ && suspension_->has_failed;
  return error_->code() == ErrorCode::kTimeout && !is_known && tensor->view_ended && *tensor->view_ended;
}

std::vector<Operation::Unfinished> Operation::unfinished() const {
  const std::lock_guard lock(error_mutex_);
  return suspension_ ? suspension_->unfinished : std::vector<Unfinished>();
}

// A continuation does not take these first bytes of the partition again.
std::uint64_t Operation::begun(std::uint32_t partition) const {
  if (!is_continuation()) return 0;
  return std::ranges::lower_bound(suspension_->begun, partition, {}, &Begun::partition)->bytes;
}

std::vector<Operation::Begun> Operation::wanted(bool whole) const {
  std::vector<Begun> found;
  for (const Unfinished& one : unfinished()) {
    const tensor::Placement placement = tensor::place(placed, cut(), one.partition);
    if (!placement.wants_data()) continue;
    const bool has_all = one.landed.aside != nullptr || one.landed.in_place == placement.length;
    if (has_all == whole) found.push_back({one.partition, has_all ? placement.length : one.landed.in_place});
  }
  std::ranges::sort(found, {}, &Begun::partition);
  return found;
}

std::vector<Operation::Begun> Operation::begun(std::span<const std::uint32_t> partitions) const {
  const std::vector<Unfinished> all = unfinished();
  std::vector<Begun> found;
  for (const std::uint32_t partition : partitions) {
    const auto one = std::ranges::find(all, partition, &Unfinished::partition);
    found.push_back({partition, one == all.end() ? 0 : one->landed.in_place});
  }
  return found;
}

void Operation::read(std::uint32_t partition, std::span<std::byte> into) const {
  const tensor::Placement placement = tensor::place(placed, cut(), partition);
  const std::lock_guard lock(error_mutex_);
  if (!suspension_ || into.size() > placement.length) return;
  const std::byte* place = request.output + placement.output_offset;
  const auto one = std::ranges::find(suspension_->unfinished, partition, &Unfinished::partition);
  if (one == suspension_->unfinished.end()) return;
  const std::byte* aside = one->landed.aside ? one->landed.aside->bytes().data() : place;
  const std::size_t first = std::min<std::size_t>(begun(partition), into.size());
  std::memcpy(into.data(), place, first);
  std::memcpy(into.data() + first, aside + first, into.size() - first);
}

void Operation::write(std::uint32_t partition, std::span<const std::byte> from) {
  const tensor::Placement placement = tensor::place(placed, cut(), partition);
  const std::lock_guard lock(error_mutex_);
  if (!suspension_ || !placement.wants_data() || from.size() > placement.length) return;
  const auto one = std::ranges::find(suspension_->unfinished, partition, &Unfinished::partition);
  if (one == suspension_->unfinished.end() || one->landed.aside || from.size() <= one->landed.in_place) return;
  std::memcpy(request.output + placement.output_offset, from.data(), from.size());
  one->landed.in_place = from.size();
}

void Operation::take_landed() {
  const std::lock_guard lock(error_mutex_);
  if (!suspension_) return;
  for (const Unfinished& one : suspension_->unfinished) {
    if (!one.landed.aside) continue;
    const tensor::Placement placement = tensor::place(placed, cut(), one.partition);
    if (placement.wants_data())
      copy_result(placement, begun(one.partition), one.landed.aside->bytes().data(), request.output);
  }
}

void Operation::resolve(const Error& failure) {
  {
    const std::lock_guard lock(error_mutex_);
    error_ = failure;
  }
  resolve(Resumption::kAborted);
}

void Operation::resolve(Resumption how, std::shared_ptr<Operation> by) {
  const std::lock_guard lock(error_mutex_);
  suspension().resumption = how;
  suspension().continued_by = std::move(by);
  suspension().unfinished.clear();
}

Operation::Resumption Operation::resumption(std::shared_ptr<Operation>* by) const {
  const std::lock_guard lock(error_mutex_);
  if (!suspension_) return Resumption::kNone;
  if (by != nullptr) *by = suspension_->continued_by;
  return suspension_->resumption;
}

void Operation::explain(const std::string& detail) {
  const std::lock_guard lock(error_mutex_);
  if (done() || !error_ || std::exchange(explained_, true)) return;
  error_ = Error(error_->code(), std::string(error_->what()) + ": " + detail, error_->hint());
}

std::optional<Error> Operation::failure() const {
  const std::lock_guard lock(error_mutex_);
  return error_;
}

void Operation::rethrow() const {
  if (state_.load(std::memory_order_acquire) != kFailed) return;
  const std::lock_guard lock(error_mutex_);  // another loop may be about to explain it
  throw Error(*error_);
}

void finish(Operation& operation, std::uint64_t count, Counters& counters) {
  if (!operation.finish(count)) return;
  // Counted before anybody can see that it is over: a caller that has waited for it finds it in the counters.
  if (operation.is_incomplete()) {
    counters.failed.add();
    return operation.end();
  }
  counters.operations.add();
  counters.operation_bytes.add(operation.bytes());
  if (operation.is_timed()) {
    const auto now = Clock::now();
    if (const auto age = operation.age(now)) operation.note_time(*age, counters);
  }
  operation.end();
}

void Operation::note_time(Duration age, Counters& counters) const {
  counters.operation_times.observe(age);
  if (counters.trace == nullptr) return;
  const TraceKey key{.group = tensor->group->id, .tensor = tensor->id, .round = round};
  counters.trace->record(TraceStage::kOperation, key, 0, static_cast<std::uint64_t>(age.count()));
}

std::optional<Duration> Operation::age(Clock::time_point now) const {
  if (deadline.at() == Clock::time_point::max()) return std::nullopt;
  return std::max(Duration::zero(), to_duration(request.timeout_s) - Duration(deadline.at() - now));
}

std::string Operation::describe() const {
  return std::string(name_of(request.kind)) + " of '" + tensor->name + "', round " + std::to_string(round);
}

// ---- Portions

tensor::PushHeader Operation::make_header() const {
  tensor::PushHeader header{};
  header.version = transport::kProtocolVersion;
  header.dtype = tensor->dtype;
  header.op = request.op;
  header.flags = request.two_phase ? tensor::kTwoPhase : 0;  // each partition adds its own
  header.kind = request.kind;
  header.member = tensor->member;
  header.group = tensor->group->id;
  header.tensor = tensor->id;
  header.round = round;
  if (request.kind == tensor::OperationKind::kAccumulate) {
    header.priority = static_cast<std::int32_t>(tensor->stored_by);
    header.place = request.addition.place();
  }
  return header;
}

Status Operation::Portion::fill(const Part& part, tensor::Placement& placement, std::byte* into, Counters& counters) {
  if (placement.is_compressed()) {
    const std::uint64_t seed = compress::seed_of(header->tensor, part.partition, header->round, header->member);
    return operation->tensor->compressor->encode(part.partition, placement.input_offset, placement,
                                                 input_bytes + placement.input_offset, into, seed, counters);
  }
  std::memcpy(into, input_bytes + placement.input_offset, placement.length);
  counters.copies.add();
  counters.copied_bytes.add(placement.length);
  return Status::kOk;
}

Status Operation::Portion::take_answer(const Part& part, const tensor::Placement& placement, const std::byte* from,
                                       Counters& counters) {
  if (!placement.wants_data()) return Status::kOk;
  if (placement.is_compressed()) {
    return operation->tensor->compressor->decode(placement, from, output_bytes + placement.output_offset, counters);
  }
  copy_result(placement, operation->begun(part.partition), from, output_bytes);
  counters.copies.add();
  counters.copied_bytes.add(placement.length);
  return Status::kOk;
}

void Operation::Portion::note_missing(const std::string& server, const std::vector<std::uint32_t>& ranks) {
  if (operation->failure()->code() == ErrorCode::kTimeout)
    operation->explain(server + " still waits for " + van::name_ranks(ranks));
}

tensor::Cancel Operation::Portion::make_cancel() const {
  tensor::Cancel message;
  message.group = operation->tensor->group->id;
  message.tensor = operation->tensor->id;
  message.round = operation->round;
  const auto failure = operation->failure();
  message.code = failure->code() == ErrorCode::kNotInitialized ? ErrorCode::kPeerLost : failure->code();
  message.what = "rank " + std::to_string(operation->tensor->group->ranks[operation->tensor->member]) + " gave up: " +
                 std::string(failure->what()).substr(operation->describe().size() + 2);  // each rank names it itself
  message.hint = failure->hint();
  return message;
}

// A failure that is that of all ranks leaves nothing to the next view. One that no server has acknowledged may be a
// success elsewhere, if the answer has landed here.
bool Operation::Portion::suspend(std::uint32_t partition, const Landed& landed, bool failed) {
  const std::lock_guard lock(operation->error_mutex_);
  if (!operation->error_) return false;
  const bool is_late = operation->error_->code() == ErrorCode::kTimeout;
  if (!is_late && operation->error_->code() != ErrorCode::kRoundAborted) return false;
  if (is_late && failed) return operation->suspension().has_failed = true, false;
  const std::uint64_t in_place = std::max(landed.in_place, operation->begun(partition));
  operation->suspension().unfinished.push_back({partition, {landed.aside, in_place}});
  return true;
}

// On the loop's thread, which registered it. Not a part of finish(), which runs once for each partition.
[[gnu::noinline]] void Operation::Portion::release_memory() {
  if (output && lies_in_place() && !output->is_current()) operation->mark_given_back();
  input.reset();
  output.reset();
}

void Operation::Portion::finish(std::uint32_t count, bool answered, Counters& counters) {
  unfinished -= count;
  if (unfinished == 0) [[unlikely]]
    release_memory();
  if (!answered) operation->mark_incomplete();
  worker::finish(*operation, count, counters);
}

}  // namespace bps::worker
