// SPDX-License-Identifier: Apache-2.0
// Defines the messages between nodes and the scheduler. Those of inquiries and of shifts have files of their own. Notes
// such as `node -> scheduler` say who sends a message to whom.
//
// On the stream, a message is a 32-bit length, then what encode() returns: one byte of type and the fields
// (core/codec.h).
//
// `call` is a number that a node gives to a request; the reply repeats it. Call 0 is the join.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "tensor/push_header.h"
#include "van/inquiry_messages.h"
#include "van/membership.h"
#include "van/origin.h"
#include "van/roll.h"
#include "van/shift_messages.h"

namespace bps::van {

inline constexpr std::size_t kMostMessageBytes = 16U << 20;
inline constexpr std::size_t kMostTextBytes = 16384;  // an error text quotes a name and two shapes
inline constexpr std::uint32_t kNoGroup = ~0U;
// The epoch of a view that is reported is below this, so that there are numbers after it.
inline constexpr std::uint32_t kMostEpochs = 1U << 31;

struct Join {  // node -> scheduler; the ranks of the node are requests
  Node node;
  std::uint32_t workers = 0;
  std::uint32_t servers = 0;
  std::uint32_t patience_ms = 0;  // how long the node is going to wait
  std::uint32_t renews = 0;       // its id in the view that has ended; 0: it is new
  std::uint32_t epoch = 1;        // the view that the handshake has told; the node's listeners expect it
  Origin origin{};
  static constexpr void fields(auto& io, auto& m) {
    io(m.node, m.workers, m.servers, m.patience_ms, m.renews, m.epoch, m.origin);
  }
  bool operator==(const Join&) const = default;
};
struct Welcome {                 // scheduler -> all nodes, when all have joined. A node finds itself by its identity.
  std::uint32_t silence_ms = 0;  // a side that has sent nothing for so long counts as lost
  std::uint32_t beat_ms = 0;     // members send a heartbeat this often, or more often
  std::uint64_t run = 0;         // the number of the job's run, see Rejoin
  Membership membership;
  static constexpr void fields(auto& io, auto& m) {
    io(m.silence_ms, m.beat_ms, m.run, m.membership);
    io.require([&] { return m.silence_ms > 0 && m.beat_ms > 0; });
  }
  bool operator==(const Welcome&) const = default;
};
struct Refused {  // scheduler -> node, which is rejected or removed for good; then the connection ends
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
  std::string hint;
  static constexpr void fields(auto& io, auto& m) {
    io(m.code);
    io.bounded(m.text, kMostTextBytes);
    io.bounded(m.hint, kMostTextBytes);
  }
  bool operator==(const Refused&) const = default;
};
struct Heartbeat {
  static constexpr void fields(auto&, auto&) {}
  bool operator==(const Heartbeat&) const = default;
};
struct Barrier {  // the reply is Done or Failed
  std::uint32_t call = 0;
  std::uint32_t group = 0;
  std::uint64_t partition_bytes = 0;  // the most that a partition shall have; the smallest wish counts; 0: no wish
  bool ends_step = false;             // processes that wait to enter the job may do so when all have come
  static constexpr std::uint64_t kLeastPartition = 8;  // as the settings allow
  static constexpr void fields(auto& io, auto& m) {
    io(m.call, m.group, m.partition_bytes, m.ends_step);
    io.require([&] { return m.partition_bytes == 0 || m.partition_bytes >= kLeastPartition; });
  }
  bool operator==(const Barrier&) const = default;
};
struct Done {
  std::uint32_t call = 0;
  std::uint64_t partition_bytes = 0;  // the smallest wish of all barriers so far; 0: none
  std::uint32_t group = kNoGroup;     // whose barrier has ended; kNoGroup: the call was no barrier
  static constexpr void fields(auto& io, auto& m) { io(m.call, m.partition_bytes, m.group); }
  bool operator==(const Done&) const = default;
};
struct Failed {
  std::uint32_t call = 0;
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
  std::string hint;
  static constexpr void fields(auto& io, auto& m) {
    io(m.call, m.code);
    io.bounded(m.text, kMostTextBytes);
    io.bounded(m.hint, kMostTextBytes);
  }
  bool operator==(const Failed&) const = default;
};
struct Cancel {  // the deadline of a call has passed: the reply is Missing, unless the real reply was faster
  std::uint32_t call = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.call); }
  bool operator==(const Cancel&) const = default;
};
struct Missing {  // the call has been cancelled; the text names the nodes it was waiting for
  std::uint32_t call = 0;
  std::string text;
  static constexpr void fields(auto& io, auto& m) {
    io(m.call);
    io.bounded(m.text, kMostTextBytes);
  }
  bool operator==(const Missing&) const = default;
};
inline constexpr std::size_t kMostDeclared = 1024;  // in one message, so that the scheduler is not busy for long
struct Declare {                                    // the reply is Declared or Failed
  std::uint32_t call = 0;
  std::vector<TensorSpec> tensors;
  static constexpr void fields(auto& io, auto& m) {
    io(m.call, m.tensors);
    io.require([&] { return m.tensors.size() <= kMostDeclared; });
  }
  bool operator==(const Declare&) const = default;
};
struct Declared {
  std::uint32_t call = 0;
  std::vector<TensorId> tensors;
  static constexpr void fields(auto& io, auto& m) { io(m.call, m.tensors); }
  bool operator==(const Declared&) const = default;
};
struct TensorFailed {  // to the ranks that have declared it: another rank declared it differently
  std::uint32_t tensor = 0;
  std::string text;
  static constexpr void fields(auto& io, auto& m) {
    io(m.tensor);
    io.bounded(m.text, kMostTextBytes);
  }
  bool operator==(const TensorFailed&) const = default;
};
struct LateRound {  // worker -> scheduler, with its heartbeats: the round it has waited for longest
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t round = 0;
  tensor::OperationKind kind{};
  static constexpr void fields(auto& io, auto& m) { io(m.group, m.tensor, m.round, m.kind); }
  auto operator<=>(const LateRound&) const = default;
};
struct RoundFailed {  // to the ranks of the group: they have called different operations
  std::uint32_t group = 0;
  std::uint32_t tensor = 0;
  std::uint32_t round = 0;
  std::string text;
  static constexpr void fields(auto& io, auto& m) {
    io(m.group, m.tensor, m.round);
    io.bounded(m.text, kMostTextBytes);
  }
  bool operator==(const RoundFailed&) const = default;
};
struct NewGroup {  // the reply is GroupReady or Failed
  std::uint32_t call = 0;
  std::vector<std::uint32_t> ranks;
  std::string name;
  static constexpr void fields(auto& io, auto& m) {
    io(m.call, m.ranks);
    io.bounded(m.name, kMostNameBytes);
  }
  bool operator==(const NewGroup&) const = default;
};
struct GroupInfo {  // scheduler -> servers; the reply is GroupAck
  Group group;
  static constexpr void fields(auto& io, auto& m) { io(m.group); }
  bool operator==(const GroupInfo&) const = default;
};
struct GroupAck {
  std::uint32_t group = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.group); }
  bool operator==(const GroupAck&) const = default;
};
struct GroupReady {
  std::uint32_t call = 0;
  std::uint32_t group = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.call, m.group); }
  bool operator==(const GroupReady&) const = default;
};
struct Leave {  // the reply is Done; nothing else is sent after it
  std::uint32_t call = 0;
  std::uint32_t lost_node = 0;  // the loss because of which the sender leaves; 0: none
  std::string reason;           // what it knows of the loss; without one, the exception with which it ends, or nothing
  std::string failure;          // how its last operation failed, or nothing
  bool suspends = false;        // workers are going to come back, it or others, and the job waits for them
  static constexpr void fields(auto& io, auto& m) {
    io(m.call, m.lost_node);
    io.bounded(m.reason, kMostTextBytes);
    io.bounded(m.failure, kMostTextBytes);
    io(m.suspends);
  }
  bool operator==(const Leave&) const = default;
};
struct AllLeft {  // every worker has left or is lost; or the job does without this server
  bool well = true;
  std::string text{};  // why the job is over here, where that is not plain
  static constexpr void fields(auto& io, auto& m) {
    io(m.well);
    io.bounded(m.text, kMostTextBytes);
  }
  bool operator==(const AllLeft&) const = default;
};
struct PeerLost {  // `node` is gone; the text names the first cause, which may be the loss of another node
  std::uint32_t node = 0;
  std::string text;
  static constexpr void fields(auto& io, auto& m) {
    io(m.node);
    io.bounded(m.text, kMostTextBytes);
  }
  bool operator==(const PeerLost&) const = default;
};

struct Suspect {  // node -> scheduler: asks what has become of `node`; the reply is PeerLost, Reachable or ViewEnded
  std::uint32_t node = 0;
  bool broken = false;  // the sender's connection to it has ended; false: it is silent
  static constexpr void fields(auto& io, auto& m) { io(m.node, m.broken); }
  bool operator==(const Suspect&) const = default;
};
struct Reachable {  // scheduler -> node: the suspected node has been heard of since
  std::uint32_t node = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.node); }
  bool operator==(const Reachable&) const = default;
};
struct Departed {  // scheduler -> all members: who is gone since the last message of this kind
  struct Member {
    std::uint32_t node = 0;
    bool is_lost = false;  // false: a worker has left, and contributes to nothing that begins now
    std::string text;
    static constexpr void fields(auto& io, auto& m) {
      io(m.node, m.is_lost);
      io.bounded(m.text, kMostTextBytes);
    }
    bool operator==(const Member&) const = default;
  };
  std::vector<Member> members;
  static constexpr void fields(auto& io, auto& m) { io(m.members); }
  bool operator==(const Departed&) const = default;
};

// Scheduler -> all members: a member is lost, or a process wants to enter, and the job goes on as another view. A
// member that takes part in it ends what is under way, closes its connections, and joins again (Join::renews) by a new
// one. Scheduler -> servers: the workers have suspended the job, and the next view begins when workers resume it.
struct ViewEnded {
  std::uint32_t epoch = 0;  // the number of the next view
  std::string text;
  std::uint32_t patience_ms = 0;  // how long the next view of a suspended job may take to begin
  static constexpr void fields(auto& io, auto& m) {
    io(m.epoch);
    io.bounded(m.text, kMostTextBytes);
    io(m.patience_ms);
  }
  bool operator==(const ViewEnded&) const = default;
};

// Node -> a scheduler that was started in the place of one that was lost: what the node knows of the job. The reply is
// ViewEnded, once all members have come or have had their time. Before it come the answers that the lost scheduler has
// given to other members, and perhaps not to this one.
struct Rejoin {
  struct Barriers {  // how many barriers of a group have ended on this node
    std::uint32_t group = 0;
    std::uint64_t ended = 0;
    static constexpr void fields(auto& io, auto& m) { io(m.group, m.ended); }
    bool operator==(const Barriers&) const = default;
  };
  struct Made {  // a group that new_group() has returned here
    Group group;
    std::string name;
    static constexpr void fields(auto& io, auto& m) {
      io(m.group);
      io.bounded(m.name, kMostNameBytes);
    }
    bool operator==(const Made&) const = default;
  };

  std::uint64_t run = 0;  // the number of the job's run; a node of another run is refused
  std::uint32_t you = 0;  // the id of the node in this view
  Membership membership;
  std::vector<Barriers> barriers;
  std::vector<Made> groups;
  std::vector<Barrier> waiting_barriers;  // calls without an answer, in their order
  std::vector<NewGroup> waiting_groups;
  std::vector<std::uint32_t> left;  // nodes that have left the job
  static constexpr void fields(auto& io, auto& m) {
    io(m.run, m.you, m.membership, m.barriers, m.groups, m.waiting_barriers, m.waiting_groups, m.left);
    io.require([&] { return m.membership.by_id(m.you) != nullptr && m.membership.epoch < kMostEpochs; });
  }
  const Node& self() const { return *membership.by_id(you); }
  bool operator==(const Rejoin&) const = default;
};

// The position in this list is the type on the wire: append only.
using Message = std::variant<Join, Welcome, Refused, Heartbeat, Barrier, Done, Failed, Cancel, Missing, Declare,
                             Declared, TensorFailed, NewGroup, GroupInfo, GroupAck, GroupReady, Leave, AllLeft,
                             PeerLost, Suspect, Reachable, Departed, ViewEnded, Ask, Asked, Question, Reply, Told,
                             Rejoin, LinkUse, BeginShift, Rounds, EndShift, LateRound, RoundFailed>;

// Returns the message without the length. Texts beyond their limit are cut; check_spec() finds names that are too long.
Bytes encode(const Message& message);
// Returns nothing for malformed bytes.
std::optional<Message> decode(std::span<const std::byte> bytes);

// Throws kInvalidArgument for a tensor that a message cannot describe.
void check_spec(const TensorSpec& spec);

}  // namespace bps::van
