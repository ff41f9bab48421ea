// SPDX-License-Identifier: Apache-2.0
// The connections of one worker session. Where the loops are joined by several paths (transport/control_paths.h), also
// the answers that the worker has not confirmed: what a path has taken may be lost with it, and is sent again by
// another one, from the result, which the round keeps until then.
//
// Threading: one thread. Memory: a stream keeps room for as many answers as were under way at one time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/round.h"
#include "tensor/control_messages.h"
#include "transport/control_paths.h"
#include "transport/transport.h"

namespace bps::server {

// One write to a worker: the result of a round, or a bare immediate.
struct Answer {
  transport::WriteOp op{};
  transport::DataEndpoint* data = nullptr;
  Round* round = nullptr;  // whose result slot the write reads; null for a bare immediate

  // It will not be written any more, so its round does not wait for that.
  void give_up() const {
    if (round != nullptr) --round->counts.writes_in_flight;
  }
};

// One data connection, and the answers that it has taken, in order.
class AnswerStream {
 public:
  explicit AnswerStream(transport::DataEndpoint* endpoint) : data(endpoint) {}

  void keep(const Answer& answer) { answers_.push_back(answer); }
  // The answers beyond those that the worker has confirmed before, up to its count; none when that cannot be right.
  std::span<const Answer> confirm(std::uint32_t count);
  std::span<const Answer> unconfirmed() const { return std::span(answers_).subspan(first_); }
  void give_up();

  transport::DataEndpoint* data;

 private:
  std::vector<Answer> answers_;
  std::size_t first_ = 0;  // those before it are confirmed
  std::uint32_t confirmed_ = 0;
};

struct WorkerPath {
  std::uint16_t id = 0;
  bool broken = false;                              // closed; the worker has not said yet what has come in
  static constexpr std::size_t kMostKeyLists = 64;  // 131,072 keys: of so many blocks of memory
  std::vector<tensor::AnswerKeys> keys{};           // for the paths that the worker offers instead
  transport::ControlEndpoint* control = nullptr;
  std::vector<AnswerStream> streams{};
};

class WorkerPaths {
 public:
  // The answers of a session that survives the loss of one path are kept.
  bool fails_over() const { return fails_over_; }
  // The worker cannot be reached any more.
  bool is_lost() const { return lost_; }
  // A path may have so many data connections at most, until the worker has attached.
  void limit_streams(std::size_t most) { most_streams_ = most; }
  // True: the worker may open this connection.
  bool may_add(const transport::Hello& hello) const;
  void add(transport::ControlEndpoint* endpoint);
  void add(transport::DataEndpoint* endpoint);

  WorkerPath* find(std::uint16_t id);
  bool has_other_than(std::uint16_t id) const;
  // Those by which the network carries nothing, as long as there are others.
  std::vector<WorkerPath*> find_silent();
  // Keeps an answer that its connection has taken, for the case that the path is lost.
  void keep(const Answer& answer);
  // Leads what was to go by a path that is lost, to memory called `key` there, to a connection of another one that the
  // worker has offered, each in turn, and changes the key.
  void lead(const WorkerPath& lost, transport::DataEndpoint*& data, std::uint64_t& key);
  std::vector<WorkerPath>& all() { return paths_; }
  // Returns any data connection, or null before the first one.
  transport::DataEndpoint* any_data() const;
  // True: the worker, or its system, has all that it was sent.
  bool is_flushed() const;
  transport::ControlPaths& control() { return control_; }

  // Nothing comes in by the path any more, and nothing goes out.
  void close(WorkerPath& path);
  // The same of all paths, for good. With `keep_control` what was sent as a message is still delivered.
  void abandon(bool keep_control);
  // Connections that are still to come will not be added to the path.
  void forget(std::uint16_t id);

 private:
  static constexpr std::size_t kMostRefused = 64;

  static bool is_usable(const WorkerPath& path);
  WorkerPath& path_of(const transport::Hello& hello);

  std::vector<WorkerPath> paths_;
  transport::ControlPaths control_;
  bool fails_over_ = false;
  bool lost_ = false;
  std::size_t most_streams_ = tensor::kMostStreams;
  std::size_t turn_ = 0;
  std::vector<std::uint16_t> refused_;  // the latest that were forgotten
};

}  // namespace bps::server
