// SPDX-License-Identifier: Apache-2.0
#include "worker/server_connection.h"

#include <algorithm>

#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

// With work to do, credits spent and nothing coming back from a server for this long, ranks may be waiting for each
// other in a deadlock; the limits of this side (scheduling credit, staging buffers) then yield by one partition.
constexpr auto kStuck = std::chrono::milliseconds(2);
constexpr double kEnds_s = 2;  // a process that is ended for longer is held by the kernel, and runs no code any more

}  // namespace

bool ServerConnection::send(const tensor::ControlMessage& message) {
  return paths_.control().send(encode(message, epoch_)) == Status::kOk;
}

bool ServerConnection::is_being_fenced() {
  if (!needs_fence() || !direct()->can_fence()) return false;
  if (!ends_by_) {
    direct()->fence();
    ends_by_ = Deadline::after(kEnds_s);
  }
  return needs_fence() && !ends_by_->passed();
}

void ServerConnection::abandon() {
  if (lost_) return;
  if (log_ && !needs_fence()) {
    for (const ServerStream& stream : paths_.streams()) stream.endpoint->direct()->take_rest();
  }
  if (std::exchange(lost_, true)) return;
  repeats.clear();
  paths_.abandon();
}

void ServerConnection::keep_log(const tensor::RedoLogAt& where) {
  if (direct() == nullptr || log_ || where.length < tensor::RedoLog::bytes()) return;
  log_memory_ = direct()->hold({where.key, where.address, where.length});
  if (log_memory_) log_.emplace(log_memory_->bytes());
}

void ServerConnection::open(std::vector<ServerPath> paths) {
  for (ServerPath& path : paths) paths_.add(std::move(path));
  needs_slots_ = direct() == nullptr;
  share();
}

void ServerConnection::share() {
  std::vector<std::uint32_t> speeds;
  for (const ServerStream& stream : paths_.streams()) speeds.push_back(stream.endpoint->rails.speed);
  shares_ = RailShares(speeds);
}

void ServerConnection::add_slots(const tensor::Credits& credits) {
  for (const tensor::SlotCredit& slot : credits.slots) {
    if (!slots.grant(slot)) {
      loop_.count_stale();
    } else if (fails_over()) {
      pushes_.forget(slot.slot);
    }
  }
  if (credits.other_keys.empty()) return;
  const std::size_t keys = credits.other_keys.size() / credits.slots.size();
  if (other_rails_ == 0) other_rails_ = keys;
  if (other_rails_ != keys) return loop_.count_stale();  // a server has the same rails for all its slots
  for (std::size_t i = 0; i < credits.slots.size(); ++i) {
    const std::size_t at = credits.slots[i].slot * other_rails_;
    if (rail_keys_.size() < at + other_rails_) rail_keys_.resize(at + other_rails_);
    std::copy_n(credits.other_keys.begin() + static_cast<std::ptrdiff_t>(i * other_rails_), other_rails_,
                rail_keys_.begin() + static_cast<std::ptrdiff_t>(at));
  }
}

std::uint64_t ServerConnection::slot_key(const tensor::SlotCredit& slot, std::size_t rail) const {
  const std::size_t at = slot.slot * other_rails_ + rail - 1;
  return rail == 0 || rail > other_rails_ || at >= rail_keys_.size() ? slot.key : rail_keys_[at];
}

bool ServerConnection::is_stuck() {
  const auto now = Clock::now();
  if (std::exchange(answered_, false)) last_answer_ = now;
  return now - last_answer_ > kStuck;
}

Duration ServerConnection::silence(Clock::time_point now, bool forgive) {
  const bool owes_reply = in_flight_ > 0 || !queue.empty();  // or slots to push into
  if (std::exchange(heard_, false) || forgive || !owes_reply) {
    silent_since_ = now;
    suspected_ = false;
    word_expected_until_ = Clock::time_point::max();
  }
  return now - silent_since_;
}

std::size_t ServerConnection::allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                                           std::uint32_t immediate) {
  return loop_.allows_answer(*this, from.rails.here, where, immediate);
}

std::uint64_t ServerConnection::stop_landing(std::uint32_t immediate) {
  std::uint64_t landed = 0;
  for (const ServerStream& stream : paths_.streams()) {
    landed = std::max(landed, stream.endpoint->stop_landing(immediate));
  }
  return landed;
}

void ServerConnection::on_cut_off(transport::DataEndpoint&, std::uint32_t immediate, std::uint64_t bytes) {
  loop_.on_cut_off(*this, immediate, bytes);
}

void ServerConnection::on_write(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) {
  if (fails_over()) loop_.note_receipt();
  // A server that shares memory has written there before, and sends an immediate alone.
  loop_.on_answer(*this, immediate, needs_slots_ ? &from : nullptr, landed);
}

void ServerConnection::on_written(transport::DataEndpoint&, std::uint64_t token) {
  loop_.on_written(*this, static_cast<std::uint32_t>(token));
}

void ServerConnection::on_descriptor(transport::DataEndpoint&, std::span<const std::byte>,
                                     const transport::RemoteSpan&) {
  loop_.count_stale();  // only workers post descriptors
}

void ServerConnection::on_message(transport::ControlEndpoint&, std::span<const std::byte> message) {
  heard_ = true;
  if (const auto received = paths_.control().receive(message)) loop_.on_message(*this, *received);
}

void ServerConnection::on_lost(transport::Endpoint& peer, const std::string& why) {
  if (lost_) return;
  if (!paths_.has_other_than(peer.hello.path)) return loop_.on_lost(*this, why);
  break_path(peer.hello.path, why);
}

// ---- Several paths

void ServerConnection::add_path(ServerPath path) {
  paths_.add(std::move(path));
  share();
}

void ServerConnection::check_paths() {
  if (lost_) return;
  for (const std::uint16_t id : paths_.silent()) break_path(id, "its network acknowledges nothing");
  for (std::size_t i = 0; i < data_endpoints(); ++i) shares_.note(i, endpoint(i).measured_rate());
  shares_.follow();
}

void ServerConnection::on_path_broken(std::uint16_t id) {
  if (paths_.is_settling(id)) return;
  if (!paths_.find(id)) {  // it was never complete here
    (void)send(tensor::PathLost{id, {}});
  } else if (paths_.has_other_than(id)) {
    break_path(id, "the server has lost it");
  } else {
    loop_.on_lost(*this, "its last connection is lost");
  }
}

// First our end is closed, so that the server may send answers again that were on their way: nothing of the path can
// change memory any more.
void ServerConnection::break_path(std::uint16_t id, const std::string& why) {
  const ServerPath* path = paths_.find(id);
  if (path == nullptr) return;
  const std::size_t rail = path->rail();
  const auto lost = paths_.close(id, why);
  share();
  for (const std::uint32_t immediate : pushes_.unanswered_by(id)) loop_.on_unread(*this, immediate);
  for (const ServerPath& other : paths_.all()) send_keys(id, rail, other);
  (void)send(tensor::PathLost{id, *lost});
}

// Answers that are still to come may take this one, and name memory by its rail.
void ServerConnection::send_keys(std::uint16_t lost, std::size_t rail, const ServerPath& other) {
  const std::vector<tensor::AnswerKeys::Key> keys = loop_.answer_keys(*this, rail, other.rail());
  std::span<const tensor::AnswerKeys::Key> rest(keys);
  do {
    const auto some = rest.first(std::min(rest.size(), tensor::kMostKeys));
    (void)send(tensor::AnswerKeys{lost, other.id, {some.begin(), some.end()}});
    rest = rest.subspan(some.size());
  } while (!rest.empty());
}

std::optional<ServerPath> ServerConnection::settle(const tensor::PathLost& lost) {
  auto path = paths_.settle(lost.path);
  if (!path) return std::nullopt;
  for (const RepeatedPush& push : pushes_.take_undelivered(lost)) repeats.push_back(push);
  return path;
}

void ServerConnection::send_receipts() {
  for (const tensor::Received& received : paths_.receipts()) (void)send(received);
}

void ServerConnection::send_landed() {
  std::vector<std::uint32_t>& all = landed_.immediates;
  for (std::size_t from = 0; from < all.size() && !lost_; from += tensor::kMostLanded) {
    const auto part = std::span(all).subspan(from, std::min(tensor::kMostLanded, all.size() - from));
    (void)send(tensor::Landed{{part.begin(), part.end()}});
  }
  all.clear();
}

}  // namespace bps::worker
