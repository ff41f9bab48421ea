// SPDX-License-Identifier: Apache-2.0
#include "van/scheduler_session.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/log.h"
#include "core/threads.h"

namespace bps::van {

SchedulerSession::SchedulerSession(VanEvents events, Options options)
    : events_(std::move(events)),
      options_(std::move(options)),
      line_(
          loop_, [this](Message&& message) { receive(std::move(message)); },
          [this](const std::string& why) { lose_scheduler(why); }),
      thread_(start_thread([this] { run(); })) {}

SchedulerSession::~SchedulerSession() {
  stopping_ = true;
  loop_.wake();
  thread_.join();
}

void SchedulerSession::run() {
  name_thread("bps-van");
  try {
    while (!stopping_) loop_.turn(std::chrono::hours(1));
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, std::string("the van failed: ") + error.what());
    finish(End::kSchedulerLost, std::string("the connection to the scheduler failed: ") + error.what());
  }
  line_.close();
  search_.reset();
}

// ---- From any thread

void SchedulerSession::open(FoundScheduler scheduler, Join join) {
  join.epoch = scheduler.session.view.epoch;
  const auto shared = std::make_shared<FoundScheduler>(std::move(scheduler));  // a posted function must be copyable
  loop_.post([this, shared, join] {
    identity_ = join.node.identity;
    if (events_.on_view) events_.on_view(shared->session.view);  // before anybody can learn where this node listens
    line_.connect(std::move(*shared));
    line_.send(join);
  });
}

void SchedulerSession::retire() {
  loop_.post([this] {
    if (!state_.is(SessionState::kRetired)) state_.enter(SessionState::kRetired);
    search_.reset();
    line_.close();
  });
}

void SchedulerSession::hang_up() {
  loop_.post([this] { line_.close(); });
}

void SchedulerSession::post(const Message& message) {
  loop_.post([this, bytes = encode(message)] { line_.send_encoded(bytes); });
}

void SchedulerSession::ask(PendingCalls::Call& call, const Message& message) {
  call.note(message);
  post(message);
}

void SchedulerSession::leave(const Leave& message) {
  loop_.post([this, message] {
    report_.note_leaving(message);
    line_.send(message);
  });
}

void SchedulerSession::suspect(std::uint32_t node, const std::string& why) {
  loop_.post([this, node, why] {
    if (peers_.is_lost(node)) return;
    peers_.add(node, why);
    if (line_.is_open()) return line_.send(Suspect{node, true});
    if (peers_.is_lost(0)) return lose(node, end_.why());  // this node itself is out
    if (is_away()) return;                                 // the next scheduler will find out
    answer_suspicion(node);
  });
}

// ---- What the scheduler says

void SchedulerSession::receive(Message&& message) {
  if (auto* first = std::get_if<Welcome>(&message); first != nullptr && !joined()) return welcome(std::move(*first));
  if (const auto* refused = std::get_if<Refused>(&message)) {
    if (joined()) return expel(refused->text);
    return calls_.answer(0, std::move(message));
  }
  if (std::holds_alternative<Heartbeat>(message)) return;
  if (!joined()) return expel("it sent an unexpected message");
  if (!receive_news(message)) receive_answer(std::move(message));
}

// Takes what nobody here has asked for. Returns false when the message is something else.
bool SchedulerSession::receive_news(const Message& message) {
  if (const auto* info = std::get_if<GroupInfo>(&message)) {
    learn(info->group);
  } else if (const auto* lost = std::get_if<PeerLost>(&message)) {
    lose(lost->node, lost->text);
  } else if (const auto* departed = std::get_if<Departed>(&message)) {
    for (const Departed::Member& member : departed->members) note_departed(member);
  } else if (const auto* ended = std::get_if<ViewEnded>(&message)) {
    end_view(*ended);
  } else if (const auto* question = std::get_if<Question>(&message)) {
    if (events_.on_question) events_.on_question(*question);
  } else if (const auto* reachable = std::get_if<Reachable>(&message)) {
    answer_suspicion(reachable->node);
  } else if (const auto* all = std::get_if<AllLeft>(&message)) {
    finish(all->well ? End::kWell : End::kBadly, all->text);
  } else if (const auto* begun = std::get_if<BeginShift>(&message)) {
    if (events_.on_shift_begun) events_.on_shift_begun(*begun);
  } else if (const auto* shifted = std::get_if<EndShift>(&message)) {
    if (events_.on_shift_ended) events_.on_shift_ended(*shifted);
  } else if (const auto* failed = std::get_if<TensorFailed>(&message)) {
    if (events_.on_tensor_failed) events_.on_tensor_failed(failed->tensor, failed->text);
  } else if (const auto* round = std::get_if<RoundFailed>(&message)) {
    if (events_.on_round_failed) events_.on_round_failed(*round);
  } else {
    return false;
  }
  return true;
}

void SchedulerSession::note_departed(const Departed::Member& member) {
  if (member.is_lost) {
    // This node may have left because of a loss, and then knows about itself.
    if (member.node != self().id) lose(member.node, member.text);
    return;
  }
  report_.note_left(member.node, member.text);
  if (events_.on_left && !peers_.is_lost(member.node)) events_.on_left(member.node, member.text);
}

void SchedulerSession::receive_answer(Message&& message) {
  std::uint32_t call = 0;
  if (const auto* done = std::get_if<Done>(&message)) {
    call = done->call;
    if (done->group != kNoGroup) report_.note_barrier(done->group);
  }
  if (const auto* failed = std::get_if<Failed>(&message)) call = failed->call;
  if (const auto* missing = std::get_if<Missing>(&message)) call = missing->call;
  if (const auto* declared = std::get_if<Declared>(&message)) call = declared->call;
  if (const auto* ready = std::get_if<GroupReady>(&message)) {
    call = ready->call;
    const auto request = calls_.request(call);
    const auto* asked = request ? std::get_if<NewGroup>(&*request) : nullptr;
    if (asked != nullptr) report_.note_group(ready->group, *asked);
  }
  if (call == 0) return expel("it sent an unexpected message");
  calls_.answer(call, std::move(message));
}

void SchedulerSession::welcome(Welcome&& welcome) {
  seat_.membership = std::move(welcome.membership);
  seat_.self = seat_.membership.find(identity_);
  if (seat_.self == nullptr) return expel("it has begun a job without this process");
  report_.begin(welcome.run);
  state_.enter(SessionState::kJoined);
  if (self().sums() && events_.on_group) {
    Group all{0, std::vector<std::uint32_t>(membership().workers)};
    std::iota(all.ranks.begin(), all.ranks.end(), 0);
    events_.on_group(all, nullptr);
  }
  // A scheduler with a longer time-out sends heartbeats less often: with a shorter one here it would seem lost.
  const double told_silence_s = welcome.silence_ms / 1e3;
  seat_.silence = to_duration(std::max(options_.heartbeat_timeout_s, told_silence_s));
  heartbeats_.emplace(loop_, welcome.beat_ms / 1e3, seat_.silence,
                      Heartbeats::Events{.find_stuck = events_.find_stuck,
                                         .can_send = [this] { return line_.is_open(); },
                                         .send =
                                             [this] {
                                               line_.send(Heartbeat{});
                                               if (events_.on_beat) events_.on_beat();
                                             },
                                         .on_due = [this](bool was_stopped) { on_beat(was_stopped); }});
  calls_.answer(0, Welcome{});
}

void SchedulerSession::learn(const Group& group) {
  if (group.ranks.back() >= membership().workers) return expel("it announced a group of ranks that do not exist");
  // The van's thread does not wait for the loops. Another scheduler may have given the group's number to others.
  const auto known = [this, group = group.id, number = line_.number()] {
    if (number == line_.number()) line_.send(GroupAck{group});
  };
  if (!events_.on_group) return known();
  events_.on_group(group, [this, known] { loop_.post(known); });
}

void SchedulerSession::end_view(const ViewEnded& ended) {
  if (ended.patience_ms != 0) end_.note_patience(ended.patience_ms);  // is noted also after another view has ended
  if (!end_.note_view_ended(ended.text)) return;
  finish(End::kViewEnded, ended.text);
  if (events_.on_view_ended) events_.on_view_ended(ended.text);  // first: a caller may go into the next view at once
  calls_.break_all(view_ended_error(ended.text));
}

// ---- Lost peers

void SchedulerSession::lose(std::uint32_t node, const std::string& why) {
  if (!peers_.note_lost(node)) return;
  end_.note_loss(node, why);
  if (events_.on_lost) events_.on_lost(node, why);
}

// Ends a suspicion: the scheduler hears the node, or there is no scheduler that could say what became of it.
void SchedulerSession::answer_suspicion(std::uint32_t node) {
  const auto suspected = peers_.why(node);
  if (!suspected) {
    if (events_.on_reachable && !peers_.is_lost(node)) events_.on_reachable(node);
    return;
  }
  const Node* peer = membership().by_id(node);
  const std::string name = peer == nullptr ? "a peer" : peer->describe();
  const std::string text = "the connection to " + name + " was lost: " + *suspected;
  const bool is_alone = state_.is(SessionState::kAlone);
  lose(node, is_alone ? text + "; no other view can follow, because " + end_.why_scheduler_lost() : text);
}

void SchedulerSession::on_beat(bool was_stopped) {
  if (!line_.is_open()) {
    // Nobody else tells a server without a scheduler that the last worker has left.
    const bool is_used = !events_.is_in_use || events_.is_in_use();
    const bool is_unused_server = self().worker_rank == kNoRank && !is_used;
    if (state_.is(SessionState::kAlone) && is_unused_server) finish(End::kSchedulerLost, end_.why_scheduler_lost());
    return;
  }
  heartbeats_->send();
  if (was_stopped) line_.forgive_silence();
  const Duration silent = line_.silence();
  if (silent <= seat_.silence || end_.resume_patience_ms() != 0) return;  // a scheduler that only waits may be stopped
  lose_scheduler("silent for " + in_seconds(silent));
}

}  // namespace bps::van
