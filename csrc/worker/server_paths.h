// SPDX-License-Identifier: Apache-2.0
// Keeps the paths of a worker loop to a server loop (transport/control_paths.h), shares the load among them, and knows
// which pushes went out by which of them. Belongs to the loop's thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tensor/control_messages.h"
#include "transport/control_paths.h"
#include "transport/data_endpoint.h"
#include "worker/rail_shares.h"

namespace bps::worker {

struct ServerPath {
  std::uint16_t id = 0;  // the id in the hello of its connections; 0: there is no other path
  std::size_t pair = 0;  // which pair of rails, as transport::rails_of() numbers them
  transport::ControlEndpoint* control = nullptr;
  std::vector<transport::DataEndpoint*> data{};
  std::string why_lost{};

  std::size_t rail() const { return control->rails.here; }
};

// Counts the pushes that go out by a data connection.
struct ServerStream {
  transport::DataEndpoint* endpoint = nullptr;
  std::uint32_t pushed = 0;
};

class ServerPaths {
 public:
  void add(ServerPath path);
  bool fails_over() const { return fails_over_; }
  transport::ControlPaths& control() { return control_; }
  // Returns true where the server works on our memory itself, and needs no slots.
  bool is_direct() const { return is_direct_; }
  // Returns the data connections of all paths that are not lost, and those of the last path even when it is.
  const std::vector<ServerStream>& streams() const { return streams_; }

  // Returns the number of the data connection that the next batch goes out by.
  std::size_t next() const { return shares_.next(); }
  ServerStream& stream(std::size_t number) { return streams_[number]; }
  transport::DataEndpoint& endpoint(std::size_t number) { return *streams_[number].endpoint; }
  // Charges a data connection for the bytes of a batch, whether there was room for it or not.
  void charge(std::size_t number, std::uint64_t bytes) { shares_.charge(number, bytes); }
  // Shares the load by what the network has carried lately.
  void follow_rates();

  const ServerPath* find(std::uint16_t id) const;
  bool has_other_than(std::uint16_t id) const;
  const std::vector<ServerPath>& all() const { return paths_; }
  // Returns the paths by which the network carries nothing, although it carries something by another path.
  std::vector<std::uint16_t> silent() const;
  // Closes a path: nothing comes in by it any more, and nothing goes out. Returns how many answers had come in by each
  // of its data connections, or nothing if it is no path in use.
  std::optional<std::vector<std::uint32_t>> close(std::uint16_t id, const std::string& why);
  // Returns true while the server has not closed its end of a path that is closed here.
  bool is_settling(std::uint16_t id) const;
  std::optional<ServerPath> settle(std::uint16_t id);
  void abandon();
  // Returns the messages that the server is to be sent: one for each path by which answers have come in since the last
  // call.
  std::vector<tensor::Received> receipts();

 private:
  void share();

  std::vector<ServerPath> paths_;
  std::vector<ServerPath> settling_;
  std::vector<ServerStream> streams_;
  std::vector<std::vector<std::uint32_t>> told_;  // for each path, what the server has been told has come in
  transport::ControlPaths control_;
  RailShares shares_;
  bool fails_over_ = false;
  bool is_direct_ = false;
};

// Names a push, and the landing slot that it fills.
struct SentPush {
  std::uint32_t immediate = 0;  // that of the partition in flight
  tensor::SlotCredit slot{};    // the slot that it still holds
};

// Remembers for each landing slot the push that fills it, until the slot is granted again.
class PushesBySlot {
 public:
  void note(const tensor::SlotCredit& slot, std::uint32_t immediate, ServerStream& stream) {
    if (slot.slot >= pushes_.size()) pushes_.resize(slot.slot + std::size_t{1});
    const transport::Hello& hello = stream.endpoint->hello;
    pushes_[slot.slot] = {.push = {immediate, slot},
                          .path = hello.path,
                          .stream = hello.stream,
                          .number = stream.pushed++,
                          .under_way = true};
  }
  void forget(tensor::SlotNumber slot) {
    if (slot < pushes_.size()) pushes_[slot].under_way = false;
  }
  // Returns the pushes that went out by this path. Some have been answered, and an entry of the table that they had may
  // be another push's by now.
  std::vector<SentPush> sent_by(std::uint16_t path) const;
  // Adds those to `repeats` that went out by a path and had not come in when the server closed it.
  void repeat_undelivered(const tensor::PathLost& lost);

  // These pushes have to be sent again. Each of them holds its slot.
  std::vector<SentPush> repeats;

 private:
  struct Push {
    SentPush push;
    std::uint16_t path = 0;
    std::uint16_t stream = 0;
    std::uint32_t number = 0;  // among the pushes of its stream
    bool under_way = false;
  };
  std::vector<Push> pushes_;
};

}  // namespace bps::worker
