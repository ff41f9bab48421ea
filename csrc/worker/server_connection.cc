// SPDX-License-Identifier: Apache-2.0
#include "worker/server_connection.h"

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

bool ServerConnection::allows_write(transport::DataEndpoint&, const transport::RemoteSpan& where,
                                    std::uint32_t immediate) {
  return loop_.allows_answer(*this, where, immediate);
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
