// SPDX-License-Identifier: Apache-2.0
#include "van/van.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <list>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/log.h"
#include "van/find_scheduler.h"
#include "van/scheduler_session.h"

namespace bps::van {

namespace {

// The scheduler decides when a wait is too long, because it knows for whom it is. It may be late by this much.
constexpr double kGraceSeconds = 1;
constexpr double kJoinPauseSeconds = 0.05;
// Other calls are counted from 1.
constexpr std::uint32_t kJoinCall = 0;
constexpr std::uint32_t kLeaveCall = ~0U;
// A longer list of tensors goes out in several messages at once: the answers are as long as the questions.
constexpr std::size_t kMostBatchBytes = kMostMessageBytes / 4;

std::string seconds_text(double seconds) {
  std::string text = std::to_string(seconds);  // "1.500000"
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.' || text.back() == ',') text.pop_back();
  return text + " s";
}

[[noreturn]] void throw_unexpected() {
  throw Error(ErrorCode::kInternal, "the scheduler gave an unexpected answer", "report this as a bug");
}

template <typename Answer>
Answer await(SchedulerSession& session, PendingCalls::Call& call, double timeout_s) {
  std::optional<Message> answer;
  try {
    answer = call.wait(Deadline::after(timeout_s));
  } catch (const Error&) {
    throw;
  } catch (...) {  // is interrupted: nobody is to count on this call any more
    const std::exception_ptr interrupt = std::current_exception();
    session.post(Cancel{call.number()});
    try {  // until the scheduler knows, a call of another rank could still meet this one
      (void)call.wait(Deadline::after(kGraceSeconds));
    } catch (...) {  // interrupted once more
    }
    std::rethrow_exception(interrupt);
  }
  if (!answer) {
    session.post(Cancel{call.number()});
    answer = call.wait(Deadline::after(kGraceSeconds));
  }
  if (answer && std::holds_alternative<Answer>(*answer)) return std::move(std::get<Answer>(*answer));
  const auto* missing = answer ? std::get_if<Missing>(&*answer) : nullptr;
  if (answer && missing == nullptr) throw_unexpected();
  std::string reason = missing == nullptr ? session.end().why_scheduler_lost() : missing->text;
  if (reason.empty()) reason = "no answer";
  throw Error(ErrorCode::kTimeout, call.what() + " took longer than " + seconds_text(timeout_s) + ": " + reason,
              "look into the logs of the ranks that are missing, or raise BPS_TIMEOUT");
}

void require_joined(const SchedulerSession& session) {
  if (!session.joined()) throw Error(ErrorCode::kNotInitialized, "this process has not joined a job", "join first");
}

void require_worker(const SchedulerSession& session, bool has_left, const std::string& what) {
  require_joined(session);
  if (has_left) throw Error(ErrorCode::kNotInitialized, "this process has left the job", "join again first");
  if (session.self().worker_rank == kNoRank) {
    throw Error(ErrorCode::kInvalidArgument, what + " is for workers, this process is a server only",
                "call it in the workers");
  }
}

}  // namespace

Van::Van(VanOptions options, transport::Credentials credentials, VanEvents events)
    : options_(std::move(options)),
      credentials_(std::move(credentials)),
      session_(std::make_unique<SchedulerSession>(
          std::move(events),
          SchedulerSession::Options{.heartbeat_timeout_s = options_.heartbeat_timeout_s,
                                    .outlives_scheduler = options_.outlives_scheduler,
                                    .scheduler_patience_s = options_.scheduler_patience_s,
                                    .find = [this](const Deadline& deadline) { return find(deadline); }})) {}

Van::~Van() = default;

// ---- Joining

void Van::join(const Node& self, std::uint32_t workers, std::uint32_t servers) {
  if (joined()) {
    throw Error(ErrorCode::kInvalidArgument, "this van has joined already", "make a new one for each job");
  }
  const Deadline deadline = Deadline::after(options_.join_timeout_s);
  while (!try_to_join(self, workers, servers, deadline)) sleep_until(Deadline::after(kJoinPauseSeconds));
}

FoundScheduler Van::find(const Deadline& deadline) const {
  return find_scheduler(options_.scheduler_host, options_.scheduler_ports, credentials_, deadline,
                        options_.scheduler_hint);
}

// Returns false when the scheduler went away without a word, perhaps as an old one that ends. Another may follow.
bool Van::try_to_join(const Node& self, std::uint32_t workers, std::uint32_t servers, const Deadline& deadline) {
  FoundScheduler found = find(deadline);
  const std::string where = found.where;
  session_->calls().reset();
  PendingCalls::Call call(session_->calls(), "joining the job", kJoinCall);
  session_->open(std::move(found), {self, workers, servers, static_cast<std::uint32_t>(deadline.left_ms()),
                                    options_.renews, 1, options_.origin});
  try {
    if (call.wait(Deadline::after(deadline.left_ms() / 1e3 + kGraceSeconds))) return true;
    throw Error(ErrorCode::kTimeout, "the scheduler at " + where + " did not let this process join in time",
                "check that the scheduler runs and is not stopped");
  } catch (const Error& error) {
    session_->hang_up();
    if (error.code() != ErrorCode::kUnreachable || deadline.passed()) throw;
    return false;
  }
}

bool Van::joined() const {
  return session_->joined();
}

const Membership& Van::membership() const {
  require_joined(*session_);
  return session_->membership();
}

const Node& Van::self() const {
  require_joined(*session_);
  return session_->self();
}

bool Van::is_late() const {
  return joined() && !has_ended_step_ && !self().has_state && membership().has_entrants();
}

// ---- Calls of a worker

std::uint64_t Van::barrier(const Group& group, double timeout_s, std::uint64_t partition_bytes) {
  return barrier(group, timeout_s, partition_bytes, false);
}

void Van::end_step(const Group& group, double timeout_s) {
  (void)barrier(group, timeout_s, 0, true);
  if (group.id == 0) has_ended_step_ = true;
}

std::uint64_t Van::barrier(const Group& group, double timeout_s, std::uint64_t partition_bytes, bool ends_step) {
  require_worker(*session_, left_, "barrier");
  PendingCalls::Call call(session_->calls(), "the barrier of group " + std::to_string(group.id));
  session_->ask(call, Barrier{call.number(), group.id, partition_bytes, ends_step});
  return await<Done>(*session_, call, timeout_s).partition_bytes;
}

std::vector<TensorId> Van::declare(std::span<const TensorSpec> tensors) {
  require_worker(*session_, left_, "declare");
  for (const TensorSpec& tensor : tensors) check_spec(tensor);
  std::list<PendingCalls::Call> calls;
  for (std::size_t next = 0; next < tensors.size();) {
    Declare batch{.call = calls.emplace_back(session_->calls(), "declaring tensors").number(), .tensors = {}};
    for (std::size_t bytes = 0;
         next < tensors.size() && bytes < kMostBatchBytes && batch.tensors.size() < kMostDeclared; ++next) {
      bytes += 32 + tensors[next].name.size() + tensors[next].shape.size() + 8 * membership().slots.size();
      batch.tensors.push_back(tensors[next]);
    }
    tell(batch);
  }
  std::vector<TensorId> ids;
  const Deadline deadline = Deadline::after(options_.call_timeout_s);
  for (PendingCalls::Call& call : calls) {
    auto answer = await<Declared>(*session_, call, deadline.left_ms() / 1e3);
    std::ranges::move(answer.tensors, std::back_inserter(ids));
  }
  if (ids.size() != tensors.size()) throw_unexpected();
  return ids;
}

Group Van::new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s) {
  require_worker(*session_, left_, "new_group");
  if (name.size() > kMostNameBytes) {
    throw Error(ErrorCode::kInvalidArgument, "the name of the group is too long", "use at most 4096 bytes");
  }
  PendingCalls::Call call(session_->calls(), "making the group '" + name + "'");
  session_->ask(call, NewGroup{call.number(), ranks, name});
  return {await<GroupReady>(*session_, call, timeout_s).group, std::move(ranks)};
}

// ---- What the scheduler is told

void Van::suspect(std::uint32_t node, const std::string& why) {
  session_->suspect(node, why);
}

void Van::inquire(std::uint32_t node) {
  if (const Node* const silent = membership().by_id(node)) {
    log_info(silent->describe() + " is silent: the scheduler is asked about it");
  }
  tell(Suspect{node});
}

void Van::tell(const Message& message) {
  session_->post(message);
}

// ---- Leaving

// A loss that is known says more than the exception, which followed from it.
void Van::say_goodbye(std::string exception, std::string failure, bool suspends, const Deadline& deadline) {
  require_joined(*session_);
  if (left_.exchange(true)) return;
  session_->calls().close();
  auto [lost_node, reason] = end().first_loss();
  PendingCalls::Call call(session_->calls(), "leaving the job", kLeaveCall);
  session_->leave(Leave{call.number(), lost_node, reason.empty() ? std::move(exception) : std::move(reason),
                        std::move(failure), suspends});
  // When the scheduler knows why we leave, nobody takes our closed connections for the cause of their trouble.
  if (end().so_far() == SessionEnd::How::kNotYet) (void)call.wait(deadline);
}

void Van::announce_leaving(double timeout_s, const std::string& failure) {
  say_goodbye("", failure, false, Deadline::after(timeout_s));
}

bool Van::leave(double timeout_s, const std::string& failure, bool suspends) {
  const Deadline deadline = Deadline::after(timeout_s);
  say_goodbye("", failure, suspends, deadline);
  const SessionEnd::How how = end().wait(deadline);
  if (how == SessionEnd::How::kSchedulerLost) {
    throw Error(ErrorCode::kPeerLost, end().why(), "look into the log of the scheduler");
  }
  return how != SessionEnd::How::kNotYet;
}

void Van::abort(const std::string& exception) {
  say_goodbye(exception.empty() ? "an exception" : exception, "", false, Deadline::after(kGraceSeconds));
}

bool Van::wait_for_end() {
  require_joined(*session_);
  return end().wait(Deadline::never()) == SessionEnd::How::kWell;
}

void Van::give_up() {
  session_->end().set(SessionEnd::How::kBadly, "");
}

const SessionEnd& Van::end() const {
  return session_->end();
}

void Van::retire() {
  session_->retire();
}

// ---- For reports

bool Van::awaits_scheduler() const {
  return session_->is_away();
}

std::vector<WaitingCall> Van::waiting_calls() const {
  return session_->calls().list();
}

Clock::time_point Van::heard() const {
  return session_->heard();
}

}  // namespace bps::van
