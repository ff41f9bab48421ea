// SPDX-License-Identifier: Apache-2.0
// Keeps the connections of one worker session. Where the loops are joined by several paths (transport/control_paths.h),
// it also keeps the answers that the worker has not confirmed. What a path has taken may be lost with it, and is then
// sent again by another path, from the result, which the round keeps until then.
//
// One thread uses it. A stream keeps room for as many answers as were under way at one time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "server/round.h"
#include "tensor/control_messages.h"
#include "transport/control_paths.h"
#include "transport/transport.h"

namespace bps::server {

// Describes one write to a worker: the result of a round, or a bare immediate.
struct Answer {
  transport::WriteOp op{};
  transport::DataEndpoint* data = nullptr;
  Round* round = nullptr;  // whose result slot the write reads; null for a bare immediate

  // Lets its round not wait for the write, which will not happen any more.
  void give_up() const {
    if (round != nullptr) --round->counts.writes_in_flight;
  }
};

// Keeps one data connection, and the answers that it has taken, in order.
class AnswerStream {
 public:
  explicit AnswerStream(transport::DataEndpoint* endpoint) : data(endpoint) {}

  void keep(const Answer& answer) { answers_.push_back(answer); }
  // Confirms answers up to this count, and returns those that the worker had not confirmed before. Returns none when
  // the count cannot be right.
  std::span<const Answer> confirm(std::uint32_t count);
  std::span<const Answer> unconfirmed() const { return std::span(answers_).subspan(first_); }
  void give_up();

  transport::DataEndpoint* data;

 private:
  std::vector<Answer> answers_;
  std::size_t first_ = 0;  // answers before this index are confirmed
  std::uint32_t confirmed_ = 0;
};

struct WorkerPath {
  std::uint16_t id = 0;
  bool broken = false;                              // it is closed; the worker has not said yet what has come in
  static constexpr std::size_t kMostKeyLists = 64;  // 131,072 keys, for as many blocks of memory
  std::vector<tensor::AnswerKeys> keys{};           // the keys for the paths that the worker offers instead
  transport::ControlEndpoint* control = nullptr;
  std::vector<AnswerStream> streams{};
};

class WorkerPaths {
 public:
  // Returns true where the session survives the loss of one path. Its answers are then kept.
  bool fails_over() const { return fails_over_; }
  // Returns true when the worker cannot be reached any more.
  bool is_lost() const { return lost_; }
  // Limits the data connections that a path may have, until the worker has attached.
  void limit_streams(std::size_t most) { most_streams_ = most; }
  // Returns true where the worker may open this connection.
  bool may_add(const transport::Hello& hello) const;
  void add(transport::ControlEndpoint* endpoint);
  void add(transport::DataEndpoint* endpoint);

  WorkerPath* find(std::uint16_t id);
  bool has_other_than(std::uint16_t id) const;
  // Returns the paths by which the network carries nothing, or none if there are no others.
  std::vector<WorkerPath*> find_silent();
  // Keeps an answer that its connection has taken, for the case that the path is lost.
  void keep(const Answer& answer);
  // Leads what was to go by a lost path, to memory called `key` there, to another connection, and changes the key. It
  // takes the connections of paths that the worker has offered, each in turn.
  void lead(const WorkerPath& lost, transport::DataEndpoint*& data, std::uint64_t& key);
  std::vector<WorkerPath>& all() { return paths_; }
  // Returns any data connection, or null before the first one.
  transport::DataEndpoint* any_data() const;
  // Returns true when the worker, or its system, has all that it was sent.
  bool is_flushed() const;
  transport::ControlPaths& control() { return control_; }

  // Closes a path: nothing comes in by it any more, and nothing goes out.
  void close(WorkerPath& path);
  // Closes all paths, for good. With `keep_control` what was sent as a message is still delivered.
  void abandon(bool keep_control);
  // Forgets a path. Connections of it that are still to come will be refused.
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
  std::vector<std::uint16_t> refused_;  // the ids of the paths that were forgotten last
};

}  // namespace bps::server
