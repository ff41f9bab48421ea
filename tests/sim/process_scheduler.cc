// SPDX-License-Identifier: Apache-2.0
// What a process says to the scheduler and hears from it: van::SchedulerSession and van::Van.
#include <utility>

#include "process.h"

namespace bps::sim {
namespace {

constexpr std::uint32_t kPatience_ms = 60000;
constexpr auto kTryAgain = std::chrono::milliseconds(10);

}  // namespace

van::Node Process::describe() const {
  van::Node node;
  node.pid = 100 + number_;
  node.identity = number_ + 1;
  node.host = "host";
  if (!shape_.host_of.empty()) {
    node.host_key = std::to_string(shape_.host_of[number_]);
    node.sums_on_host = shape_.host_sums && is_worker();
  }
  node.worker_loops = is_worker() ? 1 : 0;
  node.server_loops = 1;
  node.terms.min_workers = shape_.least;
  if (is_worker() && !shape_.shifts.empty()) {
    node.terms.placement = "auto";
    node.terms.placement_seconds = 1;
  }
  return node;
}

van::Peer Process::connect() {
  const auto peer = std::make_shared<van::Peer>(0);
  *peer = scheduler_.connect({.machine = machine_,
                              .receive =
                                  [this, peer](van::Message message) {
                                    inbox_.emplace_back(*peer, std::move(message));
                                    network_.wake(machine_);
                                  },
                              .closed =
                                  [this, peer] {
                                    inbox_.emplace_back(*peer, van::Refused{ErrorCode::kPeerLost, "closed", ""});
                                    network_.wake(machine_);
                                  }});
  return *peer;
}

void Process::join() {
  if (is_at_end()) return;
  if (!scheduler_.is_up()) return network_.events.after(kTryAgain, [this] { join(); });
  next_ = connect();
  van::Join join{.node = describe(), .workers = shape_.workers, .servers = shape_.servers, .patience_ms = kPatience_ms};
  const bool serves = !is_worker() || !shape_.dedicated;
  join.renews = renews_;
  join.epoch = scheduler_.epoch();
  join.node.worker_rank = is_worker() ? static_cast<std::int32_t>(number_) : van::kNoRank;
  join.node.server_rank = serves ? van::kAnyRank : van::kNoRank;
  scheduler_.send(next_, join);
}

void Process::beat() {
  if (is_at_end()) return;
  if (!network_.runs(machine_)) {
    network_.events.at(std::max(network_.runs_from(machine_), network_.events.now()), [this] { beat(); });
    return;
  }
  for (const van::Peer peer : {peer_, next_}) {
    if (peer != 0) scheduler_.send(peer, van::Heartbeat{});
  }
  network_.events.after(shape_.silence / 4, [this] { beat(); });
}

void Process::take(van::Peer from, const van::Message& message) {
  if (from == peer_ && std::holds_alternative<van::ViewEnded>(message)) network_.trace.note("hears end", number_);
  if (const auto* welcome = std::get_if<van::Welcome>(&message)) {
    if (from == next_) begin_view(*welcome);
  } else if (const auto* refused = std::get_if<van::Refused>(&message)) {
    if ((from != peer_ && from != next_) || state_ == State::kOver) return;
    // It came at a wrong moment; or the job is over, and what this process was in the last view hears that.
    if (refused->text == "closed" && from == next_ && (peer_ != 0 || !scheduler_.is_over())) {
      next_ = 0;
      return network_.events.after(kTryAgain, [this] { join(); });
    }
    if (refused->text == "closed" && !scheduler_.is_over()) {  // or nobody listens there any more
      if (shape_.least > 0 && !is_at_end()) return search();
      if (shape_.least > 0 && state_ == State::kFailed && view_) return search();
    }
    why_ = refused->text;
    retire("the scheduler has refused this process: " + why_);
    // The others know that it has left, and it has not been told that they do: Process::shutdown() takes that for good.
    const bool has_left = state_ == State::kLeaving && shape_.scheduler_deaths > 0;
    state_ = has_left ? State::kOver : State::kRefused;
  } else if (from == peer_ && std::holds_alternative<van::AllLeft>(message)) {
    if (state_ == State::kLeaving || !is_worker()) state_ = State::kOver;
  } else if (from != peer_ || !view_) {
    return;
  } else if (const auto* ended = std::get_if<van::ViewEnded>(&message)) {
    end_view(ended->text);
  } else if (const auto* lost = std::get_if<van::PeerLost>(&message)) {
    lose_node(lost->node, lost->text);
  } else if (const auto* departed = std::get_if<van::Departed>(&message)) {
    for (const auto& [node, is_lost, text] : departed->members) {
      if (is_lost && node != renews_) lose_node(node, text);
      if (is_lost) continue;
      left_nodes_.push_back(node);
      if (view_->server_loop) view_->server_loop->leave_node(node, text);
    }
  } else if (const auto* reachable = std::get_if<van::Reachable>(&message)) {
    const auto suspected = suspected_.find(reachable->node);
    if (suspected != suspected_.end()) {
      lose_node(reachable->node, "the connection was lost: " + suspected->second);
    } else if (view_->worker_loop) {
      view_->worker_loop->on_reachable(reachable->node);
    }
  } else if (const auto* begun = std::get_if<van::BeginShift>(&message)) {
    tell(van::Rounds{begun->number, view_->placements->begin(view_->tensors)});
  } else if (const auto* shifted = std::get_if<van::EndShift>(&message)) {
    program_->end_shift(*shifted);
  } else if (const auto* done = std::get_if<van::Done>(&message)) {
    if (done->group != van::kNoGroup) ++barriers_;
    if (done->call == kEndOfStep && state_ == State::kInView) {
      barrier_sent_ = false;
      network_.trace.note("done", number_);
      program_->commit();
    } else if (done->call == kFarewell && state_ == State::kFailed) {
      // It saves what it can, with all that it had mapped and registered.
      network_.events.after(network_.random.between({}, std::chrono::seconds(12)), [this] { take_down(); });
    }
  }
}

// The connection to the scheduler has ended: another one may be started in its place.
void Process::search() {
  peer_ = 0;
  network_.events.after(kTryAgain, [this] {
    if (peer_ != 0 || state_ == State::kDead) return;
    if (!scheduler_.is_up() || !network_.runs(machine_)) return search();
    peer_ = connect();
    network_.trace.note("rejoins", number_);
    scheduler_.send(peer_, what_is_known());
    if (left_) scheduler_.send(peer_, *left_);
  });
}

van::Rejoin Process::what_is_known() const {
  van::Rejoin known;
  known.run = Scheduler::kRun;
  known.you = renews_;
  known.membership = members_;
  known.left = left_nodes_;
  if (barriers_ > 0) known.barriers.push_back({0, barriers_});
  if (barrier_sent_ && state_ == State::kInView) known.waiting_barriers.push_back(end_of_step());
  return known;
}

void Process::tell(const van::Message& message) {
  if (peer_ != 0) scheduler_.send(peer_, message);
}

}  // namespace bps::sim
