// SPDX-License-Identifier: Apache-2.0
#include "van/scheduler_session.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/interrupt.h"
#include "core/log.h"
#include "core/threads.h"

namespace bps::van {
namespace {

constexpr double kTriesPerBeat = 8;

std::string seconds_text(Duration time) {
  const auto tenths = std::chrono::duration_cast<std::chrono::milliseconds>(time).count() / 100;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

Error scheduler_lost(const std::string& why) {
  return {ErrorCode::kPeerLost, why, "look into the log of the scheduler, then start the job again"};
}

}  // namespace

SchedulerSession::SchedulerSession(VanEvents events, Options options)
    : events_(std::move(events)), options_(std::move(options)), thread_(start_thread([this] { run(); })) {}

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
    end(End::kSchedulerLost, std::string("the connection to the scheduler failed: ") + error.what());
  }
  connection_.reset();
  search_.reset();
}

void SchedulerSession::open(FoundScheduler scheduler, Join join) {
  join.epoch = scheduler.session.view.epoch;
  const auto shared = std::make_shared<FoundScheduler>(std::move(scheduler));  // a posted function must be copyable
  loop_.post([this, shared, join] {
    if (events_.on_view) events_.on_view(shared->session.view);  // before anybody can learn where this node listens
    connect(std::move(*shared));
    connection_->send(join);
  });
}

void SchedulerSession::connect(FoundScheduler&& scheduler) {
  where_ = scheduler.where;
  ++connections_;
  connection_ = std::make_unique<Connection>(
      loop_, std::move(scheduler.socket), transport::MessageKeys::of_client(scheduler.session.key),
      [this](Message&& message) { receive(std::move(message)); },
      [this](const std::string& why) { lose_scheduler(why); });
}

void SchedulerSession::retire() {
  loop_.post([this] {
    retired_ = true;
    search_.reset();
    connection_.reset();
  });
}

void SchedulerSession::hang_up() {
  loop_.post([this] { connection_.reset(); });
}

void SchedulerSession::post(const Message& message) {
  loop_.post([this, bytes = encode(message)] {
    if (connection_) connection_->send_encoded(bytes);
  });
}

void SchedulerSession::ask(PendingCalls::Call& call, const Message& message) {
  call.note(message);
  post(message);
}

void SchedulerSession::leave(const Leave& message) {
  loop_.post([this, message] {
    leave_ = message;
    if (connection_) connection_->send(message);
  });
}

void SchedulerSession::suspect(std::uint32_t node, const std::string& why) {
  loop_.post([this, node, why] {
    if (lost_.contains(node)) return;
    suspected_.emplace(node, why);
    if (connection_) return connection_->send(Suspect{node, true});
    if (lost_.contains(0)) return lose(node, why_lost());  // this node is out itself
    if (is_away_) return;                                  // the next scheduler will find out
    answer_suspicion(node);
  });
}

void SchedulerSession::answer_suspicion(std::uint32_t node) {
  const auto suspected = suspected_.find(node);
  if (suspected == suspected_.end()) {
    if (events_.on_reachable && !lost_.contains(node)) events_.on_reachable(node);
    return;
  }
  const Node* peer = membership_.by_id(node);
  const std::string name = peer == nullptr ? "a peer" : peer->describe();
  const std::string text = "the connection to " + name + " was lost: " + suspected->second;
  lose(node, alone_.empty() ? text : text + "; no other view can follow, because " + alone_);
}

void SchedulerSession::receive(Message&& message) {
  heard_ns_ = Clock::now().time_since_epoch().count();
  if (auto* first = std::get_if<Welcome>(&message); first != nullptr && !joined_) return welcome(std::move(*first));
  if (const auto* refused = std::get_if<Refused>(&message)) {
    if (joined_) return expel(refused->text);
    return calls_.answer(0, std::move(message));
  }
  if (std::holds_alternative<Heartbeat>(message)) return;
  if (!joined_) return expel("it sent an unexpected message");
  if (const auto* info = std::get_if<GroupInfo>(&message)) return learn(info->group);
  if (const auto* lost = std::get_if<PeerLost>(&message)) return lose(lost->node, lost->text);
  if (const auto* left = std::get_if<MemberLeft>(&message)) {
    left_.push_back(left->node);
    last_left_ = left->text;
    if (events_.on_left && !lost_.contains(left->node)) events_.on_left(left->node, left->text);
    return;
  }
  if (const auto* ended = std::get_if<ViewEnded>(&message)) {
    if (ended->patience_ms != 0) resume_patience_ms_ = ended->patience_ms;  // also after another view has ended
    return end_view(ended->text);
  }
  if (const auto* question = std::get_if<Question>(&message)) {
    if (events_.on_question) events_.on_question(*question);
    return;
  }
  if (const auto* reachable = std::get_if<Reachable>(&message)) return answer_suspicion(reachable->node);
  if (const auto* all = std::get_if<AllLeft>(&message)) return end(all->well ? End::kWell : End::kBadly, all->text);
  if (const auto* failed = std::get_if<TensorFailed>(&message)) {
    if (events_.on_tensor_failed) events_.on_tensor_failed(failed->tensor, failed->text);
    return;
  }
  std::uint32_t call = 0;
  if (const auto* done = std::get_if<Done>(&message)) {
    call = done->call;
    if (done->group != kNoGroup) ++barriers_[done->group];
  }
  if (const auto* failed = std::get_if<Failed>(&message)) call = failed->call;
  if (const auto* missing = std::get_if<Missing>(&message)) call = missing->call;
  if (const auto* declared = std::get_if<Declared>(&message)) call = declared->call;
  if (const auto* ready = std::get_if<GroupReady>(&message)) {
    call = ready->call;
    note_group(*ready);
  }
  if (call == 0) return expel("it sent an unexpected message");
  calls_.answer(call, std::move(message));
}

void SchedulerSession::note_group(const GroupReady& ready) {
  const auto request = calls_.request(ready.call);
  const auto* asked = request ? std::get_if<NewGroup>(&*request) : nullptr;
  const auto is_it = [&](const Rejoin::Made& made) { return made.group.id == ready.group; };
  if (asked == nullptr || std::ranges::any_of(groups_, is_it)) return;
  groups_.push_back({{ready.group, asked->ranks}, asked->name});
}

void SchedulerSession::welcome(Welcome&& welcome) {
  membership_ = std::move(welcome.membership);
  self_ = membership_.by_id(welcome.you);
  // A scheduler with a longer time-out sends heartbeats less often: a shorter one here would find it lost too early.
  const double its_silence_s = welcome.silence_ms / 1e3;
  silence_ = to_duration(std::max(options_.heartbeat_timeout_s, its_silence_s));
  run_ = welcome.run;
  joined_ = true;
  if (self_->sums() && events_.on_group) {
    Group all{0, std::vector<std::uint32_t>(membership_.workers)};
    std::iota(all.ranks.begin(), all.ranks.end(), 0);
    events_.on_group(all, nullptr);
  }
  // Three heartbeats in the time after which the scheduler finds us lost, whatever was configured here.
  last_beat_ = last_proof_ = Clock::now();
  beat_s_ = std::min(options_.heartbeat_interval_s, its_silence_s / 3);
  heartbeat_ = loop_.every(beat_s_, [this] { beat(); });
  calls_.answer(0, Welcome{});
}

void SchedulerSession::learn(const Group& group) {
  if (group.ranks.back() >= membership_.workers) return expel("it announced a group of ranks that do not exist");
  // The van's thread does not wait for the loops. Another scheduler may have given the group's number to others.
  const auto known = [this, group = group.id, connection = connections_] {
    if (connection_ && connection == connections_) connection_->send(GroupAck{group});
  };
  if (!events_.on_group) return known();
  events_.on_group(group, [this, known] { loop_.post(known); });
}

void SchedulerSession::end_view(const std::string& why) {
  if (view_ended_) return;  // the scheduler before this one has told it, too
  view_ended_ = true;
  end(End::kViewEnded, why);
  calls_.break_all(Error(ErrorCode::kRoundAborted, why, kRepeat));
  if (events_.on_view_ended) events_.on_view_ended(why);
}

void SchedulerSession::lose(std::uint32_t node, const std::string& why) {
  suspected_.erase(node);
  if (!lost_.insert(node).second) return;
  {
    const std::lock_guard lock(mutex_);
    if (first_loss_.second.empty()) first_loss_ = {node, why};
  }
  if (events_.on_lost) events_.on_lost(node, why);
}

// The connection to the scheduler has ended, or is silent.
void SchedulerSession::lose_scheduler(const std::string& why) {
  if (retired_) return connection_.reset();
  const End end = end_so_far();
  const bool may_follow = end == End::kNotYet || end == End::kViewEnded;
  if (options_.outlives_scheduler && options_.scheduler_patience_s > 0 && joined_ && may_follow) return search(why);
  // In a view that has ended there is nothing to go on with.
  if (options_.outlives_scheduler && joined_ && end == End::kNotYet) return go_on_alone(why);
  expel(why);
}

// Calls of the scheduler wait, and so do those who suspect a peer.
void SchedulerSession::search(const std::string& why) {
  connection_.reset();
  why_away_ = why;
  is_away_ = true;
  const std::string text = "the scheduler at " + where_ + " was lost: " + why;
  {
    const std::lock_guard lock(mutex_);
    why_alone_ = text + "; another one in its place is looked for";
  }
  log_warning(text + "; sums of declared names go on, and everything else waits for a scheduler in its place, for " +
              seconds_text(to_duration(options_.scheduler_patience_s)) + " at most");
  search_ = std::make_unique<SchedulerSearch>(
      loop_, options_.scheduler_patience_s, options_.find,
      SchedulerSearch::Events{.on_found = [this](FoundScheduler&& found) { come_back(std::move(found)); },
                              .on_given_up = [this](const std::string&) { give_up_search(); }});
}

// The next view begins with other credentials; this one keeps its own.
void SchedulerSession::come_back(FoundScheduler&& scheduler) {
  search_.reset();
  is_away_ = false;
  {
    const std::lock_guard lock(mutex_);
    why_alone_.clear();
  }
  connect(std::move(scheduler));
  connection_->send(what_is_known());
  if (leave_) connection_->send(*leave_);
  log_warning("found a scheduler at " + where_ + " in the place of the lost one");
}

Rejoin SchedulerSession::what_is_known() {
  Rejoin known;
  known.run = run_;
  known.you = self_->id;
  known.membership = membership_;
  known.groups = groups_;
  known.left = left_;
  for (const auto& [group, ended] : barriers_) known.barriers.push_back({group, ended});
  for (const Message& request : calls_.requests()) {
    if (const auto* barrier = std::get_if<Barrier>(&request)) known.waiting_barriers.push_back(*barrier);
    if (const auto* group = std::get_if<NewGroup>(&request)) known.waiting_groups.push_back(*group);
  }
  return known;
}

void SchedulerSession::give_up_search() {
  search_.reset();
  is_away_ = false;
  const std::string why =
      why_away_ + ", and there was no other one for " + seconds_text(to_duration(options_.scheduler_patience_s));
  if (end_so_far() == End::kNotYet) return go_on_alone(why);
  expel(why);
}

// The members are known to each other, and what they have declared and grouped is known to them: sums go on. A
// connection to a member that breaks from here on, or broke before the scheduler said why, is the loss of that member.
void SchedulerSession::go_on_alone(const std::string& why) {
  connection_.reset();
  alone_ = "the scheduler at " + where_ + " was lost: " + why;
  {
    const std::lock_guard lock(mutex_);
    why_alone_ = alone_;
  }
  const std::string effect = alone_ + "; sums of declared names go on, but barriers, commits, new names, new groups " +
                             "and the loss of a member need the scheduler";
  log_warning(effect);
  calls_.break_all(Error(ErrorCode::kPeerLost, effect, "save a checkpoint and start the job again"));
  while (!suspected_.empty()) answer_suspicion(suspected_.begin()->first);
}

// Without a scheduler nobody else tells a server that the last worker has left.
void SchedulerSession::end_if_unused() {
  if (alone_.empty() || self_->worker_rank != kNoRank || !events_.is_in_use || events_.is_in_use()) return;
  end(End::kSchedulerLost, alone_);
}

// The job goes on without this node, if at all.
void SchedulerSession::expel(const std::string& why) {
  std::string text = "the scheduler at " + where_ + " was lost: " + why;
  // The process that hosts it may have left, perhaps because of an earlier loss.
  const std::string loss = first_loss().second;
  const std::string& first = loss.empty() ? last_left_ : loss;
  if (!first.empty()) text = first + "; after that, " + text;
  connection_.reset();
  if (!joined_) return calls_.break_all(scheduler_lost(text));
  if (end_so_far() == End::kNotYet) lose(0, text);
  while (!suspected_.empty()) lose(suspected_.begin()->first, std::string(text));
  end(End::kSchedulerLost, text);
}

void SchedulerSession::end(End how, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (end_ == End::kNotYet || end_ == End::kViewEnded) {
      end_ = how;
      why_lost_ = why;
      ended_.notify_all();
    }
  }
  if (how == End::kSchedulerLost) calls_.break_all(scheduler_lost(why));
}

std::pair<std::uint32_t, std::string> SchedulerSession::first_loss() {
  const std::lock_guard lock(mutex_);
  return first_loss_;
}

SchedulerSession::End SchedulerSession::end_so_far() {
  const std::lock_guard lock(mutex_);
  return end_;
}

SchedulerSession::End SchedulerSession::wait_for_end(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  (void)wait_until(lock, ended_, deadline, [this] { return end_ != End::kNotYet; });
  return end_;
}

std::string SchedulerSession::why_lost() {
  const std::lock_guard lock(mutex_);
  return why_lost_;
}

std::string SchedulerSession::why_scheduler_lost() {
  const std::lock_guard lock(mutex_);
  if (!why_alone_.empty()) return why_alone_;
  return end_ == End::kSchedulerLost ? why_lost_ : "";
}

void SchedulerSession::beat() {
  const auto now = Clock::now();
  const auto since_last = now - std::exchange(last_beat_, now);
  if (!connection_) return end_if_unused();
  send_heartbeat();
  // A process that was stopped itself (by a debugger, by a closed lid) cannot tell who was silent meanwhile.
  if (since_last > silence_ / 2) connection_->forgive_silence();
  const auto silent = now - connection_->heard();
  if (silent <= silence_ || resume_patience_ms_ != 0) return;  // whoever only waits may be stopped
  lose_scheduler("silent for " + seconds_text(silent));
}

void SchedulerSession::send_heartbeat() {
  if (!connection_) return;
  const auto now = Clock::now();
  const std::string stuck = events_.find_stuck ? events_.find_stuck() : "";
  if (stuck.empty()) {
    connection_->send(Heartbeat{});
    last_proof_ = now;
    warned_ = false;
    return;
  }
  next_try_ = loop_.after(beat_s_ / kTriesPerBeat, [this] { send_heartbeat(); });
  if (now - last_proof_ < silence_ / 2 || std::exchange(warned_, true)) return;
  log_warning(stuck + " has made no progress for " + seconds_text(now - last_proof_) +
              ": the scheduler hears nothing of this process until it does, and counts it as lost after " +
              seconds_text(silence_));
}

}  // namespace bps::van
