// What nodes and the scheduler say to each other. Every message lists its fields once; encoder and decoder walk that
// list, so they cannot disagree.
//
// On the stream: a 32-bit length, then one byte of type and the fields, little-endian. decode() takes what follows the
// length and trusts nothing: lengths, counts, enums, ranks and the bytes left over are all checked. It is the only
// decoder of the van, and it is fuzzed.
//
// The namespace keeps their short names from waiting others: two types of one name in bps would break the program
// without a word from compiler or linker.
//
// A `call` numbers a question of one node; the answer repeats it. Call 0 is the join.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "van/membership.h"

namespace bps::van {

inline constexpr std::size_t kMostMessageBytes = 16U << 20;  // a Declare of 10,000 tensors takes about 1 MB
inline constexpr std::size_t kMostNameBytes = 4096;
inline constexpr std::size_t kMostShapeBytes = 1024;
inline constexpr std::size_t kMostTextBytes = 16384;        // an error text quotes a name and two shapes
inline constexpr std::uint64_t kMostElements = 1ULL << 48;  // times eight bytes is still far from overflow

struct Join {  // node -> scheduler: ranks are wishes
  Node node;
  std::uint32_t workers = 0;
  std::uint32_t servers = 0;
  std::uint32_t patience_ms = 0;  // how long the caller is going to wait
  bool operator==(const Join&) const = default;
};
struct Welcome {  // scheduler -> node: all have joined
  std::uint32_t you = 0;
  std::uint32_t silence_ms = 0;  // after so much silence either side counts the other as lost
  Membership membership;
  bool operator==(const Welcome&) const = default;
};
struct Refused {  // scheduler -> node, then the connection ends: not let in, or thrown out
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
  std::string hint;
  bool operator==(const Refused&) const = default;
};
struct Heartbeat {
  bool operator==(const Heartbeat&) const = default;
};
struct Barrier {  // answered by Done or Failed
  std::uint32_t call = 0;
  std::uint32_t group = 0;
  bool operator==(const Barrier&) const = default;
};
struct Done {
  std::uint32_t call = 0;
  bool operator==(const Done&) const = default;
};
struct Failed {
  std::uint32_t call = 0;
  ErrorCode code = ErrorCode::kInternal;
  std::string text;
  std::string hint;
  bool operator==(const Failed&) const = default;
};
struct Cancel {  // the caller's patience is at its end: answered by Missing, unless the real answer was faster
  std::uint32_t call = 0;
  bool operator==(const Cancel&) const = default;
};
struct Missing {  // the call is forgotten; the text says who it was still waiting for
  std::uint32_t call = 0;
  std::string text;
  bool operator==(const Missing&) const = default;
};
struct Declare {  // answered by Declared or Failed
  std::uint32_t call = 0;
  std::vector<TensorSpec> tensors;
  bool operator==(const Declare&) const = default;
};
struct Declared {
  std::uint32_t call = 0;
  std::vector<TensorId> tensors;
  bool operator==(const Declared&) const = default;
};
struct TensorFailed {  // to ranks that have declared it: another one disagrees
  std::uint32_t tensor = 0;
  std::string text;
  bool operator==(const TensorFailed&) const = default;
};
struct NewGroup {  // answered by GroupReady or Failed
  std::uint32_t call = 0;
  std::vector<std::uint32_t> ranks;
  std::string name;
  bool operator==(const NewGroup&) const = default;
};
struct GroupInfo {  // scheduler -> servers; answered by GroupAck
  Group group;
  bool operator==(const GroupInfo&) const = default;
};
struct GroupAck {
  std::uint32_t group = 0;
  bool operator==(const GroupAck&) const = default;
};
struct GroupReady {
  std::uint32_t call = 0;
  std::uint32_t group = 0;
  bool operator==(const GroupReady&) const = default;
};
struct Leave {  // answered by Done; nothing else is sent after it
  std::uint32_t call = 0;
  std::uint32_t lost_node = 0;  // the sender leaves because of this loss; 0: for no such reason
  std::string reason;           // what the sender knows of it
  bool operator==(const Leave&) const = default;
};
struct AllLeft {  // every worker has left or is lost
  bool well = true;
  bool operator==(const AllLeft&) const = default;
};
struct PeerLost {  // `node` is gone; the text names the first cause, which may be the loss of another node
  std::uint32_t node = 0;
  std::string text;
  bool operator==(const PeerLost&) const = default;
};

struct Suspect {  // node -> scheduler: my connection to `node` broke; answered by PeerLost or Reachable
  std::uint32_t node = 0;
  bool operator==(const Suspect&) const = default;
};
struct Reachable {  // scheduler -> node: the suspected one has been heard of since
  std::uint32_t node = 0;
  bool operator==(const Reachable&) const = default;
};

// The place in this list is the type on the wire: append only.
using Message =
    std::variant<Join, Welcome, Refused, Heartbeat, Barrier, Done, Failed, Cancel, Missing, Declare, Declared,
                 TensorFailed, NewGroup, GroupInfo, GroupAck, GroupReady, Leave, AllLeft, PeerLost, Suspect, Reachable>;

// Without the length. Texts beyond their limit are cut; names are to be checked before.
Bytes encode(const Message& message);
// Nothing on anything malformed.
std::optional<Message> decode(std::span<const std::byte> bytes);

// What a specification must be to travel: throws kInvalidArgument.
void check_spec(const TensorSpec& spec);

}  // namespace bps::van
