// SPDX-License-Identifier: Apache-2.0
#include "server/worker_session.h"

#include <algorithm>

#include "core/log.h"
#include "server/round_engine.h"

namespace bps::server {

WorkerSession::WorkerSession(const SessionContext& context, const van::Node& worker, std::uint16_t worker_loop,
                             transport::Transport& transport)
    : context_(context),
      node_(worker.id),
      worker_rank_(static_cast<std::uint32_t>(worker.worker_rank)),
      worker_loop_(worker_loop),
      name_(worker.describe()),
      transport_(transport),
      window_(context.pool, transport, context.sends_due, context.epoch) {}

void WorkerSession::accept(std::unique_ptr<transport::IncomingConnection> incoming) {
  if (incoming->hello.plane == transport::Plane::kData) {
    paths_.add(transport_.accept_data(std::move(incoming), *this));
  } else {
    paths_.add(transport_.accept_control(std::move(incoming), *this));
  }
}

bool WorkerSession::attach(const tensor::Attach& attach) {
  if (std::exchange(attached_, true)) return false;
  data_endpoints_ = attach.data_endpoints;
  return true;
}

transport::DirectAccess* WorkerSession::direct() {
  for (const WorkerPath& path : paths_.all()) {
    for (const AnswerStream& stream : path.streams) return stream.data->direct();
  }
  return nullptr;
}

void WorkerSession::send(const tensor::ControlMessage& message) {
  (void)paths_.control().send(encode(message, context_.epoch));
}

bool WorkerSession::flush() {
  return waiting_.flush([this](const Answer& answer) {
    if (fails_over()) keep(answer);
  });
}

// There is no room for it now, or nobody to send it to.
void WorkerSession::hold_up(const Answer& answer) {
  const bool is_taken = !lost_ && !waiting_.is_full();
  if (!is_taken) {
    if (answer.round != nullptr) --answer.round->counts.writes_in_flight;
    if (!lost_) lose("it takes none of its answers");
    return;
  }
  waiting_.add(answer);
  context_.sends_due.answers = true;
}

bool WorkerSession::is_flushed() {
  if (lost_) return true;
  if (has_answers() || !committed_.immediates.empty()) return false;
  return std::ranges::all_of(paths_.all(), [](const WorkerPath& path) {
    return (path.control == nullptr || path.control->is_flushed()) &&
           std::ranges::all_of(path.streams, [](const AnswerStream& stream) { return stream.data->is_flushed(); });
  });
}

// ---- Rounds in two phases

void WorkerSession::commit(std::uint32_t immediate) {
  committed_.immediates.push_back(immediate);
  context_.sends_due.commits = true;
}

void WorkerSession::send_commits() {
  std::vector<std::uint32_t>& all = committed_.immediates;
  if (!lost_ && !all.empty() && !paths_.control().empty()) {
    for (std::size_t from = 0; from < all.size(); from += tensor::kMostLanded) {
      const auto part = std::span(all).subspan(from, std::min(tensor::kMostLanded, all.size() - from));
      send(tensor::Committed{{part.begin(), part.end()}});
    }
  }
  all.clear();
}

void WorkerSession::send_credits() {
  if (!lost_ && !paths_.control().empty()) window_.send_credits(paths_.control());
}

void WorkerSession::abandon(bool keep_control) {
  lost_ = true;
  for (const WorkerPath& path : paths_.all()) {
    for (const AnswerStream& stream : path.streams) stream.data->abandon();
    if (path.control != nullptr && !keep_control) path.control->abandon();
  }
}

void WorkerSession::discard() {
  const auto is_any = [](const transport::DataEndpoint*) { return true; };
  waiting_.take(is_any, [](const Answer& answer) {
    if (answer.round != nullptr) --answer.round->counts.writes_in_flight;
  });
  for (WorkerPath& path : paths_.all()) {
    for (AnswerStream& stream : path.streams) {
      for (const Answer& answer : stream.unconfirmed()) {
        if (answer.round != nullptr) --answer.round->counts.writes_in_flight;
      }
      stream.clear();
    }
  }
  window_.close();
}

std::size_t WorkerSession::allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                                        std::uint32_t immediate) {
  Slot* slot = context_.pool.by_number(immediate);
  return slot != nullptr && window_.begin_fill(*slot, from, where) ? 1 : 0;
}

void WorkerSession::on_write(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) {
  context_.rounds.on_write(*this, from, immediate, landed);
}

void WorkerSession::on_descriptor(transport::DataEndpoint& from, std::span<const std::byte> header,
                                  const transport::RemoteSpan& span) {
  context_.rounds.on_descriptor(*this, from, header, span);
}

void WorkerSession::on_written(transport::DataEndpoint&, std::uint64_t token) {
  context_.rounds.on_written(token);
}

void WorkerSession::on_message(transport::ControlEndpoint&, std::span<const std::byte> message) {
  if (const auto received = paths_.control().receive(message)) context_.owner.on_message(*this, *received);
}

void WorkerSession::on_lost(transport::Endpoint& peer, const std::string& why) {
  if (lost_) return;
  const std::uint16_t id = peer.hello.path;
  WorkerPath* path = id == 0 ? nullptr : paths_.find(id);
  if (path == nullptr || !paths_.has_other_than(id)) return lose(why);
  if (!path->broken) break_path(*path, why);
}

// ---- Several paths

void WorkerSession::keep(const Answer& answer) {
  paths_.stream_of(answer.data)->keep(answer);
}

void WorkerSession::confirm(const tensor::Received& received) {
  WorkerPath* path = paths_.find(received.path);
  if (path == nullptr) return;  // it was settled meanwhile
  for (AnswerStream& stream : path->streams) {
    if (stream.data->hello.stream >= received.answers.size()) continue;
    for (const Answer& answer : stream.confirm(received.answers[stream.data->hello.stream])) {
      if (answer.round != nullptr) context_.rounds.on_written(answer.round->token());
    }
  }
}

void WorkerSession::add_keys(const tensor::AnswerKeys& keys) {
  WorkerPath* path = paths_.find(keys.path);
  if (path == nullptr) return;  // it was settled meanwhile, or never complete
  if (path->keys.size() == WorkerPath::kMostKeyLists) return lose("it names more memory than a worker can wait for");
  path->keys.push_back(keys);
}

void WorkerSession::check_paths() {
  if (lost_) return;
  const auto is_silent = [](const WorkerPath& path) {
    return (path.control != nullptr && path.control->is_silent()) ||
           std::ranges::any_of(path.streams, [](const AnswerStream& stream) { return stream.data->is_silent(); });
  };
  std::vector<WorkerPath*> silent;
  bool others = false;
  for (WorkerPath& path : paths_.all()) {
    if (path.broken) continue;
    if (is_silent(path)) {
      silent.push_back(&path);
    } else {
      others |= WorkerPaths::is_usable(path);
    }
  }
  for (WorkerPath* path : silent) {
    if (others) break_path(*path, "its network acknowledges nothing");
  }
}

// The worker may have received more than is known here. It says so later, and then the rest is sent again.
void WorkerSession::break_path(WorkerPath& path, const std::string& why) {
  log_info("a connection to " + name_ + " is lost: " + why + "; the other rails are used");
  context_.counters.paths_lost.add();
  paths_.close(path);
  send(tensor::PathBroken{path.id});
}

std::vector<transport::Endpoint*> WorkerSession::settle(const tensor::PathLost& lost) {
  std::vector<transport::Endpoint*> closed;
  tensor::PathLost reply{lost.path, {}};
  WorkerPath* path = paths_.find(lost.path);
  if (path != nullptr && !paths_.has_other_than(lost.path)) return closed;  // it came by that very path
  std::vector<Answer> again;
  WorkerPath old;
  if (path != nullptr) {
    if (!path->broken) context_.counters.paths_lost.add();
    paths_.close(*path);
    confirm({lost.path, lost.received});
    if (path->control != nullptr) closed.push_back(path->control);
    for (AnswerStream& stream : path->streams) {
      const std::size_t number = stream.data->hello.stream;
      reply.received.resize(std::max(reply.received.size(), number + 1));
      reply.received[number] = stream.data->received;
      again.insert(again.end(), stream.unconfirmed().begin(), stream.unconfirmed().end());
      closed.push_back(stream.data);
    }
    old = std::move(*path);
  }
  paths_.forget(lost.path);
  const auto lead = [&](transport::DataEndpoint*& data, std::uint64_t& key) { paths_.lead(old, data, key); };
  for (const transport::Endpoint* endpoint : closed) {
    if (!endpoint->is_data_plane) continue;
    const auto* data = static_cast<const transport::DataEndpoint*>(endpoint);
    context_.pool.stop_fill(*data);
    context_.rounds.reroute(*data, lead);
  }
  context_.counters.repeated.add(again.size());
  const auto is_closed = [&](transport::DataEndpoint* data) { return std::ranges::find(closed, data) != closed.end(); };
  waiting_.take(is_closed, [&](const Answer& answer) { again.push_back(answer); });  // these were never sent
  send(reply);
  for (Answer& answer : again) {
    lead(answer.data, answer.op.target.key);
    post(answer);
  }
  return closed;
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
