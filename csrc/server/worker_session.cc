// SPDX-License-Identifier: Apache-2.0
#include "server/worker_session.h"

#include <algorithm>

#include "core/log.h"
#include "server/round_engine.h"

namespace bps::server {

WorkerSession::WorkerSession(const SessionContext& context, const van::Node& worker, std::uint16_t worker_loop,
                             transport::Transport& transport)
    : client{worker.id, static_cast<std::uint32_t>(worker.worker_rank), worker_loop, worker.describe()},
      context_(context),
      transport_(transport),
      window_(context.pool, transport, context.sends_due, context.epoch),
      answers_(paths_, context.sends_due) {}

void WorkerSession::accept(std::unique_ptr<transport::IncomingConnection> incoming) {
  if (incoming->hello.plane == transport::Plane::kData) {
    paths_.add(transport_.accept_data(std::move(incoming), *this));
  } else {
    paths_.add(transport_.accept_control(std::move(incoming), *this));
  }
}

bool WorkerSession::attach(const tensor::Attach& attach) {
  if (std::exchange(attached_, true)) return false;
  paths_.limit_streams(attach.data_endpoints);
  return true;
}

transport::DirectAccess* WorkerSession::direct() {
  transport::DataEndpoint* data = paths_.any_data();
  return data == nullptr ? nullptr : data->direct();
}

void WorkerSession::send(const tensor::ControlMessage& message) {
  (void)paths_.control().send(encode(message, context_.epoch));
}

bool WorkerSession::is_flushed() const {
  return is_lost() || (answers_.is_empty() && !answers_.has_commits() && paths_.is_flushed());
}

void WorkerSession::send_credits() {
  if (!is_lost() && !paths_.control().empty()) window_.send_credits(paths_.control());
}

void WorkerSession::lose(std::string_view why) {
  context_.owner.on_lost(*this, std::string(why));
}

void WorkerSession::discard() {
  answers_.give_up();
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

void WorkerSession::on_posting(transport::DataEndpoint& from, std::span<const std::byte> header,
                               const transport::RemoteSpan& span) {
  context_.rounds.on_posting(*this, from, header, span);
}

void WorkerSession::on_written(transport::DataEndpoint&, std::uint64_t token) {
  context_.rounds.on_written(token);
}

void WorkerSession::on_message(transport::ControlEndpoint&, std::span<const std::byte> message) {
  if (const auto received = paths_.control().receive(message)) context_.owner.on_message(*this, *received);
}

void WorkerSession::on_lost(transport::Endpoint& peer, const std::string& why) {
  if (is_lost()) return;
  const std::uint16_t id = peer.hello.path;
  WorkerPath* path = id == 0 ? nullptr : paths_.find(id);
  if (path == nullptr || !paths_.has_other_than(id)) return lose(why);
  if (!path->broken) break_path(*path, why);
}

// ---- Several paths

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
  if (path == nullptr) return;  // it was settled meanwhile, or was never complete
  if (path->keys.size() == WorkerPath::kMostKeyLists) return lose("it names more memory than a worker can wait for");
  path->keys.push_back(keys);
}

void WorkerSession::check_paths() {
  if (is_lost()) return;
  for (WorkerPath* path : paths_.find_silent()) break_path(*path, "its network acknowledges nothing");
}

// The worker may have received more than is known here. It says so later, and then the rest is sent again.
void WorkerSession::break_path(WorkerPath& path, const std::string& why) {
  log_info("a connection to " + client.name + " is lost: " + why + "; the other rails are used");
  context_.counters.paths_lost.add();
  paths_.close(path);
  send(tensor::PathBroken{path.id});
}

std::vector<transport::Endpoint*> WorkerSession::settle(const tensor::PathLost& lost) {
  WorkerPath* path = paths_.find(lost.path);
  if (path != nullptr && !paths_.has_other_than(lost.path)) return {};  // the message came by that very path
  WorkerPath old;
  if (path != nullptr) {
    if (!path->broken) context_.counters.paths_lost.add();
    paths_.close(*path);
    confirm({lost.path, lost.received});
    old = std::move(*path);
  }
  paths_.forget(lost.path);
  tensor::PathLost reply{lost.path, {}};
  std::vector<Answer> again;
  std::vector<transport::Endpoint*> closed;
  const auto lead = [&](transport::DataEndpoint*& data, std::uint64_t& key) { paths_.lead(old, data, key); };
  if (old.control != nullptr) closed.push_back(old.control);
  for (const AnswerStream& stream : old.streams) {
    const std::size_t number = stream.data->hello.stream;
    reply.received.resize(std::max(reply.received.size(), number + 1));
    reply.received[number] = stream.data->received;
    again.insert(again.end(), stream.unconfirmed().begin(), stream.unconfirmed().end());
    closed.push_back(stream.data);
    context_.pool.stop_fill(*stream.data);
    context_.rounds.reroute(*stream.data, lead);
  }
  context_.counters.repeated.add(again.size());
  answers_.take(old, again);  // these were never sent
  send(reply);
  for (Answer& answer : again) {
    lead(answer.data, answer.op.target.key);
    post(answer);
  }
  return closed;
}

WorkerSession* find_session(const Sessions& sessions, std::uint32_t worker_rank, std::uint16_t worker_loop) {
  for (const auto& session : sessions) {
    if (session->client.worker_rank == worker_rank && session->client.worker_loop == worker_loop &&
        !session->is_lost()) {
      return session.get();
    }
  }
  return nullptr;
}

}  // namespace bps::server
