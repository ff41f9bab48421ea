// SPDX-License-Identifier: Apache-2.0
#include "van/van.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "van/find_scheduler.h"
#include "van/scheduler_session.h"

namespace bps::van {

namespace {

// The scheduler decides when a wait has been too long, because it knows for whom; this is what it may be late by.
constexpr double kGraceSeconds = 1;
constexpr double kJoinPauseSeconds = 0.05;
// The others are counted from 1.
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

}  // namespace

class Van::Impl {
 public:
  Impl(VanOptions options, transport::Credentials credentials, VanEvents events)
      : options_(std::move(options)),
        credentials_(std::move(credentials)),
        session_(std::move(events), {.heartbeat_timeout_s = options_.heartbeat_timeout_s,
                                     .outlives_scheduler = options_.outlives_scheduler,
                                     .scheduler_patience_s = options_.scheduler_patience_s,
                                     .find = [this](const Deadline& deadline) { return find(deadline); }}) {}

  void join(Node self, std::uint32_t workers, std::uint32_t servers) {
    if (session_.joined()) {
      throw Error(ErrorCode::kInvalidArgument, "this van has joined already", "make a new one for each job");
    }
    const Deadline deadline = Deadline::after(options_.join_timeout_s);
    while (!try_to_join(self, workers, servers, deadline)) sleep_until(Deadline::after(kJoinPauseSeconds));
  }

  std::uint64_t barrier(const Group& group, double timeout_s, std::uint64_t partition_bytes, bool ends_step) {
    require_worker("barrier");
    PendingCalls::Call call(session_.calls(), "the barrier of group " + std::to_string(group.id));
    session_.ask(call, Barrier{call.number(), group.id, partition_bytes, ends_step});
    return await<Done>(call, timeout_s).partition_bytes;
  }

  std::vector<TensorId> declare(std::span<const TensorSpec> tensors) {
    require_worker("declare");
    for (const TensorSpec& tensor : tensors) check_spec(tensor);
    std::list<PendingCalls::Call> calls;
    for (std::size_t next = 0; next < tensors.size();) {
      Declare batch{.call = calls.emplace_back(session_.calls(), "declaring tensors").number(), .tensors = {}};
      for (std::size_t bytes = 0;
           next < tensors.size() && bytes < kMostBatchBytes && batch.tensors.size() < kMostDeclared; ++next) {
        bytes += 32 + tensors[next].name.size() + tensors[next].shape.size() + 8 * session_.membership().slots.size();
        batch.tensors.push_back(tensors[next]);
      }
      session_.post(batch);
    }
    std::vector<TensorId> ids;
    const Deadline deadline = Deadline::after(options_.call_timeout_s);
    for (PendingCalls::Call& call : calls) {
      auto answer = await<Declared>(call, deadline.left_ms() / 1e3);
      std::ranges::move(answer.tensors, std::back_inserter(ids));
    }
    if (ids.size() != tensors.size()) unexpected();
    return ids;
  }

  Group new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s) {
    require_worker("new_group");
    if (name.size() > kMostNameBytes) {
      throw Error(ErrorCode::kInvalidArgument, "the name of the group is too long", "use at most 4096 bytes");
    }
    PendingCalls::Call call(session_.calls(), "making the group '" + name + "'");
    session_.ask(call, NewGroup{call.number(), ranks, name});
    return {await<GroupReady>(call, timeout_s).group, std::move(ranks)};
  }

  void announce_leaving(double timeout_s, std::string failure) {
    require_joined();
    say_goodbye("", std::move(failure), false, Deadline::after(timeout_s));
  }

  bool leave(double timeout_s, std::string failure, bool suspends) {
    require_joined();
    const Deadline deadline = Deadline::after(timeout_s);
    say_goodbye("", std::move(failure), suspends, deadline);
    const SchedulerSession::End end = session_.end().wait(deadline);
    if (end == SchedulerSession::End::kSchedulerLost) {
      throw Error(ErrorCode::kPeerLost, session_.end().why(), "look into the log of the scheduler");
    }
    return end != SchedulerSession::End::kNotYet;
  }

  void abort(const std::string& exception) {
    require_joined();
    say_goodbye(exception.empty() ? "an exception" : exception, "", false, Deadline::after(kGraceSeconds));
  }

  void suspect(std::uint32_t node, const std::string& why) { session_.suspect(node, why); }
  void inquire(std::uint32_t node) { session_.post(Suspect{node}); }

  bool wait_for_end() {
    require_joined();
    return session_.end().wait(Deadline::never()) == SchedulerSession::End::kWell;
  }

  // The view has ended, and the job has not.
  void require_next_view() {
    switch (session_.end().so_far()) {
      case SchedulerSession::End::kSchedulerLost:
        throw Error(ErrorCode::kPeerLost, session_.end().why(), "look into the log of the scheduler");
      case SchedulerSession::End::kWell:
      case SchedulerSession::End::kBadly:
        throw Error(ErrorCode::kPeerLost,
                    session_.end().why().empty() ? "every worker has left the job" : session_.end().why(),
                    "start the job again");
      default: break;
    }
  }

  void require_joined() const {
    if (!session_.joined()) throw Error(ErrorCode::kNotInitialized, "this process has not joined a job", "join first");
  }

  const VanOptions options_;
  const transport::Credentials credentials_;
  std::atomic<bool> left_{false};
  SchedulerSession session_;

 private:
  // A loss that is known says more than the exception, which followed from it.
  void say_goodbye(std::string exception, std::string failure, bool suspends, const Deadline& deadline) {
    if (left_.exchange(true)) return;
    session_.calls().close();
    auto [lost_node, reason] = session_.end().first_loss();
    PendingCalls::Call call(session_.calls(), "leaving the job", kLeaveCall);
    session_.leave(Leave{call.number(), lost_node, reason.empty() ? std::move(exception) : std::move(reason),
                         std::move(failure), suspends});
    // When the scheduler knows why we leave, nobody takes our closed connections for the cause of their trouble.
    if (session_.end().so_far() == SchedulerSession::End::kNotYet) (void)call.wait(deadline);
  }

  // False when the scheduler went away without a word: an old one that is ending, perhaps. Then the next may be found.
  FoundScheduler find(const Deadline& deadline) const {
    return find_scheduler(options_.scheduler_host, options_.scheduler_ports, credentials_, deadline,
                          options_.scheduler_hint);
  }

  bool try_to_join(const Node& self, std::uint32_t workers, std::uint32_t servers, const Deadline& deadline) {
    FoundScheduler found = find(deadline);
    const std::string where = found.where;
    session_.calls().reset();
    PendingCalls::Call call(session_.calls(), "joining the job", kJoinCall);
    session_.open(std::move(found), {self, workers, servers, static_cast<std::uint32_t>(deadline.left_ms()),
                                     options_.renews, 1, options_.origin});
    try {
      if (call.wait(Deadline::after(deadline.left_ms() / 1e3 + kGraceSeconds))) return true;
      throw Error(ErrorCode::kTimeout, "the scheduler at " + where + " did not let this process join in time",
                  "check that the scheduler runs and is not stopped");
    } catch (const Error& error) {
      session_.hang_up();
      if (error.code() != ErrorCode::kPeerLost || deadline.passed()) throw;
      return false;
    }
  }

  void require_worker(const std::string& what) const {
    require_joined();
    if (left_) throw Error(ErrorCode::kNotInitialized, "this process has left the job", "join again first");
    if (session_.self().worker_rank == kNoRank) {
      throw Error(ErrorCode::kInvalidArgument, what + " is for workers, this process is a server only",
                  "call it in the workers");
    }
  }

  template <typename Answer>
  Answer await(PendingCalls::Call& call, double timeout_s) {
    std::optional<Message> answer;
    try {
      answer = call.wait(Deadline::after(timeout_s));
    } catch (const Error&) {
      throw;
    } catch (...) {  // interrupted: nobody is to count on this call any more
      session_.post(Cancel{call.number()});
      throw;
    }
    if (!answer) {
      session_.post(Cancel{call.number()});
      answer = call.wait(Deadline::after(kGraceSeconds));
    }
    if (answer && std::holds_alternative<Answer>(*answer)) return std::move(std::get<Answer>(*answer));
    const auto* missing = answer ? std::get_if<Missing>(&*answer) : nullptr;
    if (answer && missing == nullptr) unexpected();
    std::string reason = missing == nullptr ? session_.end().why_scheduler_lost() : missing->text;
    if (reason.empty()) reason = "no answer";
    throw Error(ErrorCode::kTimeout, call.what() + " took longer than " + seconds_text(timeout_s) + ": " + reason,
                "look into the logs of the ranks that are missing, or raise BPS_TIMEOUT");
  }

  [[noreturn]] void unexpected() const {
    throw Error(ErrorCode::kInternal, "the scheduler gave an unexpected answer", "report this as a bug");
  }
};

Van::Van(VanOptions options, transport::Credentials credentials, VanEvents events)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(credentials), std::move(events))) {}
Van::~Van() = default;

EventLoop& Van::loop() {
  return impl_->session_.loop();
}
const transport::Credentials& Van::credentials() const {
  return impl_->credentials_;
}
void Van::join(Node self, std::uint32_t workers, std::uint32_t servers) {
  impl_->join(std::move(self), workers, servers);
}
const Membership& Van::membership() const {
  impl_->require_joined();
  return impl_->session_.membership();
}
const Node& Van::self() const {
  impl_->require_joined();
  return impl_->session_.self();
}
std::uint64_t Van::barrier(const Group& group, double timeout_s, std::uint64_t partition_bytes) {
  return impl_->barrier(group, timeout_s, partition_bytes, false);
}
void Van::end_step(const Group& group, double timeout_s) {
  (void)impl_->barrier(group, timeout_s, 0, true);
}
std::vector<TensorId> Van::declare(std::span<const TensorSpec> tensors) {
  return impl_->declare(tensors);
}
Group Van::new_group(std::vector<std::uint32_t> ranks, const std::string& name, double timeout_s) {
  return impl_->new_group(std::move(ranks), name, timeout_s);
}
bool Van::leave(double timeout_s, const std::string& failure, bool suspends) {
  return impl_->leave(timeout_s, failure, suspends);
}
void Van::announce_leaving(double timeout_s, const std::string& failure) {
  impl_->announce_leaving(timeout_s, failure);
}
bool Van::has_ended() const {
  return impl_->session_.end().so_far() != SchedulerSession::End::kNotYet;
}
void Van::suspect(std::uint32_t node, const std::string& why) {
  impl_->suspect(node, why);
}
void Van::abort(const std::string& exception) {
  impl_->abort(exception);
}
void Van::reply(const Reply& reply) {
  impl_->session_.post(reply);
}
void Van::tell(const Message& message) {
  impl_->session_.post(message);
}
const std::string& Van::scheduler_host() const {
  return impl_->options_.scheduler_host;
}
const std::vector<std::uint16_t>& Van::scheduler_ports() const {
  return impl_->options_.scheduler_ports;
}
std::string Van::why_lost() const {
  return impl_->session_.end().why_scheduler_lost();
}
bool Van::awaits_scheduler() const {
  return impl_->session_.is_away();
}
std::vector<WaitingCall> Van::waiting_calls() const {
  return impl_->session_.calls().list();
}
void Van::retire() {
  impl_->session_.retire();
}
void Van::inquire(std::uint32_t node) {
  impl_->inquire(node);
}
bool Van::wait_for_end() {
  return impl_->wait_for_end();
}
bool Van::joined() const {
  return impl_->session_.joined();
}
Clock::time_point Van::heard() const {
  return impl_->session_.heard();
}
double Van::resume_patience_s() const {
  return impl_->session_.end().resume_patience_ms() / 1e3;
}
std::string Van::why_ended() const {
  return impl_->session_.end().why();
}
bool Van::view_ended() const {
  return impl_->session_.end().view_ended();
}
void Van::require_next_view() const {
  impl_->require_next_view();
}
void Van::give_up() {
  impl_->session_.end().set(SchedulerSession::End::kBadly, "");
}

}  // namespace bps::van
