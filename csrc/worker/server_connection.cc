// SPDX-License-Identifier: Apache-2.0
#include "worker/server_connection.h"

#include <algorithm>

#include "worker/receiver.h"

namespace bps::worker {

bool ServerConnection::send(const tensor::ControlMessage& message) {
  return paths.control().send(encode(message, epoch_)) == Status::kOk;
}

bool ServerConnection::fence() {
  if (!needs_fence() || !direct()->can_fence()) return false;
  if (!loss.is_ending()) {
    direct()->fence();
    loss.note_ending();
  }
  return needs_fence() && !loss.is_due();
}

void ServerConnection::close() {
  if (is_closed()) return;
  // An answer may lie in shared memory, or in another socket, although the end of the server was seen first.
  if (!needs_fence()) {
    for (const ServerStream& stream : paths.streams()) stream.endpoint->take_rest();
  }
  if (is_closed()) return;  // what it had posted before was wrong
  loss.close();
  pushes.repeats.clear();
  paths.abandon();
}

void ServerConnection::keep_log(const tensor::RedoLogAt& where) {
  if (direct() == nullptr || log.is_held() || where.length < tensor::RedoLog::bytes()) return;
  log.hold(direct()->hold({where.key, where.address, where.length}));
}

void ServerConnection::open(std::vector<ServerPath> all) {
  for (ServerPath& path : all) paths.add(std::move(path));
}

void ServerConnection::add_slots(const tensor::Credits& credits) {
  for (const tensor::SlotCredit& slot : credits.slots) {
    if (!slots.grant(slot)) {
      receiver_.count_stale();
    } else if (paths.fails_over()) {
      pushes.forget(slot.slot);
    }
  }
  if (!slots.keep_keys(credits)) receiver_.count_stale();
}

std::size_t ServerConnection::allows_write(transport::DataEndpoint& from, const transport::RemoteSpan& where,
                                           std::uint32_t immediate) {
  return receiver_.partitions().allows_answer(*this, from.rails.here, where, immediate);
}

std::uint64_t ServerConnection::stop_landing(std::uint32_t immediate) {
  std::uint64_t landed = 0;
  for (const ServerStream& stream : paths.streams()) {
    landed = std::max(landed, stream.endpoint->stop_landing(immediate));
  }
  return landed;
}

void ServerConnection::on_cut_off(transport::DataEndpoint&, std::uint32_t immediate, std::uint64_t bytes) {
  receiver_.partitions().note_cut_off(*this, immediate, bytes);
}

void ServerConnection::on_write(transport::DataEndpoint& from, std::uint32_t immediate, std::uint64_t landed) {
  if (paths.fails_over()) receiver_.note_receipt();
  // A server that shares memory has written there before, and sends only an immediate.
  receiver_.on_answer(*this, immediate, needs_slots() ? &from : nullptr, landed);
}

void ServerConnection::on_written(transport::DataEndpoint&, std::uint64_t token) {
  receiver_.partitions().note_unread(*this, static_cast<std::uint32_t>(token));
}

void ServerConnection::on_posting(transport::DataEndpoint&, std::span<const std::byte>, const transport::RemoteSpan&) {
  receiver_.count_stale();  // only workers post
}

void ServerConnection::on_message(transport::ControlEndpoint&, std::span<const std::byte> message) {
  silence.note_word();
  if (const auto received = paths.control().receive(message)) receiver_.on_message(*this, *received);
}

void ServerConnection::on_lost(transport::Endpoint& peer, const std::string& why) {
  if (is_closed()) return;
  if (!paths.has_other_than(peer.hello.path)) return receiver_.on_lost(*this, why);
  break_path(peer.hello.path, why);
}

// ---- Several paths

void ServerConnection::check_paths() {
  if (is_closed()) return;
  for (const std::uint16_t id : paths.silent()) break_path(id, "its network acknowledges nothing");
  paths.follow_rates();
}

void ServerConnection::on_path_broken(std::uint16_t id) {
  if (paths.is_settling(id)) return;
  if (!paths.find(id)) {  // this path was never complete here
    (void)send(tensor::PathLost{id, {}});
  } else if (paths.has_other_than(id)) {
    break_path(id, "the server has lost it");
  } else {
    receiver_.on_lost(*this, "its last connection is lost");
  }
}

// Closes our end first, so that nothing of the path can change memory any more. The server may then send answers again
// that were on their way.
void ServerConnection::break_path(std::uint16_t id, const std::string& why) {
  const ServerPath* path = paths.find(id);
  if (path == nullptr) return;
  const std::size_t rail = path->rail();
  const auto lost = paths.close(id, why);
  for (const SentPush& push : pushes.sent_by(id)) receiver_.partitions().note_given_up(*this, push);
  for (const ServerPath& other : paths.all()) send_keys(id, rail, other);
  (void)send(tensor::PathLost{id, *lost});
}

// Names memory by the rail of this path, as answers that are still to come may take it.
void ServerConnection::send_keys(std::uint16_t lost, std::size_t rail, const ServerPath& other) {
  const std::vector<tensor::AnswerKeys::Key> keys = receiver_.partitions().answer_keys(*this, rail, other.rail());
  std::span<const tensor::AnswerKeys::Key> rest(keys);
  do {
    const auto some = rest.first(std::min(rest.size(), tensor::kMostKeys));
    (void)send(tensor::AnswerKeys{lost, other.id, {some.begin(), some.end()}});
    rest = rest.subspan(some.size());
  } while (!rest.empty());
}

std::optional<ServerPath> ServerConnection::settle(const tensor::PathLost& lost) {
  auto path = paths.settle(lost.path);
  if (!path) return std::nullopt;
  pushes.repeat_undelivered(lost);
  return path;
}

void ServerConnection::send_receipts() {
  for (const tensor::Received& received : paths.receipts()) (void)send(received);
}

void ServerConnection::send_landed() {
  for (std::size_t from = 0; from < untold.size() && !is_closed(); from += tensor::kMostLanded) {
    const auto part = std::span(untold).subspan(from, std::min(tensor::kMostLanded, untold.size() - from));
    (void)send(tensor::Landed{{part.begin(), part.end()}});
  }
  untold.clear();
}

}  // namespace bps::worker
