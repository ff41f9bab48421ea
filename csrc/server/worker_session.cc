// SPDX-License-Identifier: Apache-2.0
#include "server/worker_session.h"

#include <algorithm>

#include "server/round_engine.h"

namespace bps::server {

WorkerSession::WorkerSession(const SessionContext& context, const van::Node& worker, std::uint16_t its_loop,
                             transport::Transport& by)
    : context_(context),
      node_(worker.id),
      worker_rank_(static_cast<std::uint32_t>(worker.worker_rank)),
      worker_loop_(its_loop),
      name_(worker.describe()),
      transport_(by),
      window_(context.pool, by, context.sends_due, context.epoch) {}

bool WorkerSession::is_complete(transport::Plane plane) const {
  return plane == transport::Plane::kData ? data_.size() >= data_endpoints_ : control_ != nullptr;
}

void WorkerSession::accept(std::unique_ptr<transport::IncomingConnection> incoming) {
  if (incoming->hello.plane == transport::Plane::kData) {
    data_.push_back(transport_.accept_data(std::move(incoming), *this));
  } else {
    control_ = transport_.accept_control(std::move(incoming), *this);
  }
}

bool WorkerSession::attach(const tensor::Attach& attach) {
  if (std::exchange(attached_, true)) return false;
  data_endpoints_ = attach.data_endpoints;
  return true;
}

void WorkerSession::send(const tensor::ControlMessage& message) {
  if (control_ != nullptr) (void)control_->send(encode(message, context_.epoch));
}

bool WorkerSession::flush() {
  std::size_t sent = 0;
  while (sent < answers_.size() && answers_[sent].data->write({&answers_[sent].op, 1}) == 1) ++sent;
  answers_.erase(answers_.begin(), answers_.begin() + static_cast<std::ptrdiff_t>(sent));
  return sent > 0;
}

void WorkerSession::send_credits() {
  if (!lost_ && control_ != nullptr) window_.send_credits(*control_);
}

void WorkerSession::abandon(bool keep_control) {
  lost_ = true;
  for (transport::DataEndpoint* endpoint : data_) endpoint->abandon();
  if (control_ != nullptr && !keep_control) control_->abandon();
}

void WorkerSession::discard() {
  for (const Answer& answer : answers_) {
    if (answer.round != nullptr) --answer.round->writes_in_flight;
  }
  answers_.clear();
  window_.close();
}

bool WorkerSession::allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                                 std::uint32_t immediate) {
  Slot* slot = context_.pool.by_number(immediate);
  return slot != nullptr && window_.begin_fill(*slot, from, where);
}

void WorkerSession::on_write(transport::DataEndpoint& from, std::uint32_t immediate) {
  context_.rounds.on_write(*this, from, immediate);
}

void WorkerSession::on_descriptor(transport::DataEndpoint& from, std::span<const std::byte> header,
                                  const transport::RemoteSpan& span) {
  context_.rounds.on_descriptor(*this, from, header, span);
}

void WorkerSession::on_written(transport::DataEndpoint&, std::uint64_t token) {
  context_.rounds.on_written(token);
}

void WorkerSession::on_message(transport::ControlEndpoint&, std::span<const std::byte> message) {
  context_.owner.on_message(*this, message);
}

void WorkerSession::on_lost(transport::Endpoint&, const std::string& why) {
  lose(why);
}

WorkerSession* find_session(const Sessions& sessions, std::uint32_t worker_rank, std::uint16_t worker_loop) {
  for (const auto& session : sessions) {
    if (session->worker_rank() == worker_rank && session->worker_loop() == worker_loop && !session->is_lost()) {
      return session.get();
    }
  }
  return nullptr;
}

}  // namespace bps::server
