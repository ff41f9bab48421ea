// SPDX-License-Identifier: Apache-2.0
#include "worker/server_connection.h"

#include <algorithm>

#include "worker/worker_loop.h"

namespace bps::worker {
namespace {

// With work to do, credits spent and nothing coming back from a server for this long, ranks may be waiting for each
// other in a deadlock; the limits of this side (scheduling credit, staging buffers) then yield by one partition.
constexpr auto kStuck = std::chrono::milliseconds(2);

}  // namespace

bool ServerConnection::send(const tensor::ControlMessage& message) {
  return control_->send(encode(message, epoch_)) == Status::kOk;
}

void ServerConnection::abandon() {
  if (std::exchange(lost_, true)) return;
  for (transport::DataEndpoint* endpoint : data_) endpoint->abandon();
  control_->abandon();
}

void ServerConnection::open(transport::ControlEndpoint* control, std::vector<transport::DataEndpoint*> data) {
  control_ = control;
  data_ = std::move(data);
  needs_slots_ = data_.front()->direct() == nullptr;
  std::vector<std::uint32_t> speeds;
  for (const transport::DataEndpoint* one : data_) speeds.push_back(one->rails.speed);
  shares_ = RailShares(speeds);
}

void ServerConnection::add_slots(const tensor::Credits& credits) {
  for (const tensor::SlotCredit& slot : credits.slots) add_slot(slot);
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

bool ServerConnection::take_slot(std::uint64_t bytes, tensor::SlotCredit& slot) {
  auto& slots = tensor::is_small_slot(bytes) && !small_slots_.empty() ? small_slots_ : large_slots_;
  if (slots.empty()) return false;
  slot = slots.back();
  slots.pop_back();
  return true;
}

bool ServerConnection::is_stuck() {
  const auto now = Clock::now();
  if (std::exchange(answered_, false)) last_answer_ = now;
  return now - last_answer_ > kStuck;
}

Duration ServerConnection::silence(Clock::time_point now, bool forgive) {
  const bool owes_reply = in_flight_ > 0;
  if (std::exchange(heard_, false) || forgive || !owes_reply) {
    silent_since_ = now;
    suspected_ = false;
    word_expected_until_ = Clock::time_point::max();
  }
  return now - silent_since_;
}

bool ServerConnection::allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                                    std::uint32_t immediate) {
  return loop_.allows_answer(*this, from.rails.here, where, immediate);
}

void ServerConnection::on_write(transport::DataEndpoint&, std::uint32_t immediate) {
  loop_.on_answer(*this, immediate);
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
  loop_.on_message(*this, message);
}

void ServerConnection::on_lost(transport::Endpoint&, const std::string& why) {
  loop_.on_lost(*this, why);
}

}  // namespace bps::worker
