// SPDX-License-Identifier: Apache-2.0
#include "process.h"

#include <utility>

namespace bps::sim {
namespace {

constexpr auto kThreadBehind = std::chrono::milliseconds(2);
constexpr auto kLookAgain = std::chrono::microseconds(20);
constexpr auto kLookAgainWhenBlocked = std::chrono::microseconds(500);  // no event announces what it waits for

}  // namespace

Process::Process(const Shape& shape, Network& network, Scheduler& scheduler, std::uint32_t number)
    : shape_(shape),
      network_(network),
      scheduler_(scheduler),
      number_(number),
      machine_(network.add([this] { step(); })) {
  if (shape.is_worker(number)) program_ = std::make_unique<Program>(shape, network, number + 1);
  network_.events.after(shape_.silence / 4, [this] { beat(); });
}

// ---- Views

void Process::begin_view(const van::Welcome& welcome) {
  if (peer_ != 0) scheduler_.hang_up(peer_);
  peer_ = std::exchange(next_, 0);
  view_.reset();
  suspected_.clear();
  lost_node_ = 0;
  barrier_sent_ = false;
  renews_ = welcome.membership.find(number_ + 1)->id;
  members_ = welcome.membership;
  barriers_ = 0;
  left_nodes_.clear();
  std::vector<Machine> machine_of;
  for (const van::Node& node : welcome.membership.nodes) machine_of.push_back(node.pid - 100);
  view_ = std::make_unique<View>(shape_, network_, welcome.membership, renews_, machine_of);
  if (view_->worker_loop) {
    view_->worker_loop->events.when_lost = [this](std::uint32_t node, const std::string& why) { suspect(node, why); };
    view_->worker_loop->events.when_silent = [this](std::uint32_t node) { tell(van::Suspect{node}); };
  }
  if (view_->server_loop) {
    view_->server_loop->when_lost = [this](std::uint32_t node, const std::string& why) { suspect(node, why); };
  }
  network_.listen(machine_, view_->epoch(), [this](std::unique_ptr<transport::IncomingConnection> incoming) {
    incoming_.push_back(std::move(incoming));
    network_.wake(machine_);
  });
  state_ = State::kInView;
  network_.trace.note("view", number_, view_->epoch(), view_->membership.workers);
  if (program_) program_->begin(*view_);
}

void Process::end_view(const std::string& why) {
  if (state_ != State::kInView && state_ != State::kLeaving) return;
  retire(why);
  // One that has left waits only for the others of its view.
  state_ = state_ == State::kLeaving ? State::kOver : State::kRetiring;
}

// Everything that is under way ends: with the view, or because this process ends.
void Process::retire(const std::string& why) {
  if (!view_ || retires_by_) return;
  network_.trace.say("retires", number_, why);
  if (view_->placements) view_->placements->stop();
  if (state_ == State::kFailed) {
    view_->worker_loop->abort_operations([](const worker::Operation&) { return true; }, ErrorCode::kNotInitialized,
                                         "bps_rdma was shut down", "wait");
  } else {
    const Error error(ErrorCode::kRoundAborted, why, "repeat the step");
    view_->end->note(why);
    if (view_->server_loop) view_->server_loop->end_view(error);
    if (view_->worker_loop) view_->worker_loop->end_view(error);
  }
  retires_by_ = network_.events.now() + shape_.silence + std::chrono::seconds(2);
  network_.wake_at(machine_, *retires_by_);
}

void Process::take_down() {
  if (program_) program_->check_returned();
  incoming_.clear();
  view_.reset();
  retires_by_.reset();
}

void Process::suspect(std::uint32_t node, const std::string& why) {
  if (leave_sent_) return;  // nothing is sent after it
  suspected_.emplace(node, why);
  tell(van::Suspect{node, true});
}

void Process::lose_node(std::uint32_t node, const std::string& why) {
  suspected_.erase(node);
  network_.trace.say("loses", number_, why);
  const van::Node* gone = view_->membership.by_id(node);
  if (gone == nullptr) return;
  if (lost_node_ == 0) lost_node_ = node;
  if (program_) program_->lose(why);
  if (view_->worker_loop) {
    view_->worker_loop->abort_operations([](const worker::Operation&) { return true; }, ErrorCode::kPeerLost, why,
                                         "restart");
    view_->worker_loop->lose_server(node, why);
  }
  if (view_->server_loop) view_->server_loop->lose_node(node, why);
}

void Process::die(bool silently) {
  network_.trace.note("dies", number_, silently ? 1 : 0);
  if (!silently) {
    if (view_) view_->transport.hang_up();
    for (const van::Peer peer : {peer_, next_}) {
      if (peer != 0) scheduler_.hang_up(peer);
    }
  }
  state_ = State::kDead;
  network_.kill(machine_);
}

// ---- The loop

void Process::step() {
  if (!network_.runs(machine_)) return network_.wake_at(machine_, network_.runs_from(machine_));
  // The scheduler speaks to another thread, which may be behind.
  for (; !inbox_.empty() && !network_.random.chance(0.3); inbox_.pop_front()) {
    const auto [from, message] = inbox_.front();
    take(from, message);
  }
  if (!inbox_.empty()) network_.wake_at(machine_, network_.events.now() + network_.random.between({}, kThreadBehind));
  if (!view_) return;
  for (; !incoming_.empty(); incoming_.pop_front()) view_->accept(std::move(incoming_.front()));
  bool found = view_->turn();
  if (program_) found |= follow_program();
  if (retires_by_ && (!view_->worker_loop || view_->worker_loop->is_idle() || *retires_by_ <= network_.events.now())) {
    if (state_ == State::kRetiring) {
      take_down();
      if (program_) program_->collect();
      state_ = State::kJoining;
      return join();
    }
    if (state_ == State::kFailed && !leave_sent_) return leave(lost_node_, why_);
    if (state_ == State::kRefused) return take_down();
  }
  if (found) {
    network_.wake_at(machine_, network_.events.now() + network_.random.between({}, kLookAgain));
  } else if (view_->blocked()) {
    network_.wake_at(machine_, network_.events.now() + kLookAgainWhenBlocked);
  }
  network_.wake_at(machine_, view_->next_timer());
  if (program_ && state_ == State::kInView) network_.wake_at(machine_, program_->next_start());
}

bool Process::follow_program() {
  if (state_ != State::kInView) return false;
  const bool started = program_->turn();
  switch (program_->state()) {
    case Program::State::kAtEndOfStep:
      if (std::exchange(barrier_sent_, true)) break;
      network_.trace.note("waits", number_);
      tell(end_of_step());
      break;
    case Program::State::kThrough:
      leave(0, "");
      state_ = State::kLeaving;
      break;
    case Program::State::kFailed:  // an exception ends it: the others are told why when its operations are over
      why_ = program_->why_failed();
      state_ = State::kFailed;
      retire(why_);
      break;
    default: break;
  }
  return started;
}

void Process::leave(std::uint32_t lost, const std::string& why) {
  leave_sent_ = true;
  left_ = van::Leave{.call = kFarewell, .lost_node = lost, .reason = why, .failure = ""};
  tell(*left_);
}

void Process::show_open() const {
  if (!view_ || state_ == State::kDead) return;
  constexpr std::size_t kMost = 20;
  if (view_->worker_loop) {
    for (const worker::OpenPartition& one : view_->worker_loop->list_open(kMost)) {
      network_.trace.say("open", number_,
                         one.operation + ", partition " + std::to_string(one.partition) + " at " + one.server +
                             (one.waits == worker::OpenPartition::Waits::kForAnswer ? ", sent" : ", not sent"));
    }
  }
  if (!view_->server_loop) return;
  for (const server::OpenRound& one : view_->server_loop->list_open(kMost)) {
    network_.trace.say("open round", number_,
                       "tensor " + std::to_string(one.key.tensor) + ", partition " + std::to_string(one.key.partition) +
                           ", round " + std::to_string(one.number) + (one.key.for_host ? ", of the host" : "") +
                           ", waits for " + std::to_string(static_cast<int>(one.waits)));
  }
}

std::ptrdiff_t Process::slots_beyond_grants() const {
  if (!view_) return 0;
  std::ptrdiff_t count = 0;
  if (view_->server_loop) count += static_cast<std::ptrdiff_t>(view_->server_loop->untold_slots());
  if (view_->worker_loop) count += static_cast<std::ptrdiff_t>(view_->slots() - program_->granted());
  return count;
}

void Process::check_end() const {
  if (!view_) return;
  if (view_->server_loop && view_->server_loop->open_rounds() != 0) throw Violation("a round is open at the end");
  if (!view_->worker_loop) return;
  if (!view_->worker_loop->is_idle()) throw Violation("an operation is open at the end");
  for (const worker::WorkerUsage::Server& server : view_->worker_loop->usage().servers) {
    if (server.partitions_in_flight != 0 || server.bytes_in_flight != 0) throw Violation("a partition is in flight");
  }
}

}  // namespace bps::sim
