#include "van/messages.h"

#include <algorithm>
#include <array>
#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

#include "core/dtype.h"

namespace bps::van {
namespace {

constexpr std::size_t kMostHostBytes = 256;
constexpr std::size_t kMostTransportBytes = 16;
constexpr std::size_t kMostAddressBytes = 65536;

// Puts fields into a message. It has the same face as Take, so that one list of fields serves both.
class Put {
 public:
  void number(std::integral auto value) { out_.put(value); }
  void flag(bool value) { out_.put(static_cast<std::uint8_t>(value)); }
  void code(ErrorCode value) { out_.put(static_cast<std::uint8_t>(value)); }
  void text(const std::string& value, std::size_t most) { out_.put(std::string_view(value).substr(0, most)); }
  void bytes(const Bytes& value, std::size_t most) {
    out_.put_bytes(std::span(value).first(std::min(value.size(), most)));
  }
  void list(const auto& items, std::size_t /*least_bytes_each*/, auto fields_of_item) {
    number(static_cast<std::uint32_t>(items.size()));
    for (const auto& item : items) fields_of_item(item);
  }
  void require(auto /*condition*/) {}
  Bytes take() { return out_.take(); }

 private:
  Writer out_;
};

// Takes fields out of a message; remembers when one was not what it may be.
class Take {
 public:
  explicit Take(std::span<const std::byte> bytes) : in_(bytes) {}
  void number(std::integral auto& value) { value = in_.get<std::remove_reference_t<decltype(value)>>(); }
  void flag(bool& value) {
    const auto byte = in_.get<std::uint8_t>();
    value = byte == 1;
    good_ = good_ && byte <= 1;
  }
  void code(ErrorCode& value) {
    const auto byte = in_.get<std::uint8_t>();
    value = ErrorCode{byte};
    good_ = good_ && value <= ErrorCode::kInternal;
  }
  void text(std::string& value, std::size_t most) {
    const auto found = bounded(most);
    value.assign(reinterpret_cast<const char*>(found.data()), found.size());
  }
  void bytes(Bytes& value, std::size_t most) {
    const auto found = bounded(most);
    value.assign(found.begin(), found.end());
  }
  void list(auto& items, std::size_t least_bytes_each, auto fields_of_item) {
    const auto count = in_.get<std::uint32_t>();
    if (!good_ || !in_.fits(count, least_bytes_each)) return;
    items.resize(count);
    for (auto& item : items) {
      fields_of_item(item);
      if (!good_ || !in_.ok()) return;
    }
  }
  void require(auto condition) { good_ = good_ && in_.ok() && condition(); }
  bool done() const { return good_ && in_.done(); }

 private:
  std::span<const std::byte> bounded(std::size_t most) {
    const auto found = in_.get_bytes();
    good_ = good_ && found.size() <= most;
    return good_ ? found : std::span<const std::byte>();
  }

  Reader in_;
  bool good_ = true;
};

// The lists of fields. `io` is Put, and the message const, or Take, and it is not.
template <typename Io, typename T>
using Ref = std::conditional_t<std::same_as<Io, Put>, const T&, T&>;

template <typename Io>
void fields(Io& io, Ref<Io, TransportAddress> m) {
  io.text(m.transport, kMostTransportBytes);
  io.bytes(m.address, kMostAddressBytes);
}
template <typename Io>
void fields(Io& io, Ref<Io, Node> m) {
  io.number(m.id);
  io.number(m.worker_rank);
  io.number(m.server_rank);
  io.number(m.worker_loops);
  io.number(m.server_loops);
  io.number(m.pid);
  io.text(m.host, kMostHostBytes);
  io.text(m.host_key, kMostHostBytes);
  io.list(m.addresses, 8, [&](auto& address) { fields(io, address); });
  io.require([&] { return m.worker_rank >= kAnyRank && m.server_rank >= kAnyRank; });
}
template <typename Io>
void fields(Io& io, Ref<Io, Membership> m) {
  io.number(m.workers);
  io.number(m.servers);
  io.list(m.nodes, 32, [&](auto& node) { fields(io, node); });
  io.require([&] { return m.is_consistent(); });
}
template <typename Io>
void fields(Io& io, Ref<Io, Group> m) {
  io.number(m.id);
  io.list(m.ranks, 4, [&](auto& rank) { io.number(rank); });
  io.require(
      [&] { return !m.ranks.empty() && std::ranges::adjacent_find(m.ranks, std::greater_equal()) == m.ranks.end(); });
}
template <typename Io>
void fields(Io& io, Ref<Io, TensorSpec> m) {
  io.number(m.group);
  io.text(m.name, kMostNameBytes);
  io.number(m.dtype);
  io.number(m.count);
  io.text(m.shape, kMostShapeBytes);
  io.require([&] { return size_of(Dtype{m.dtype}) != 0 && m.count <= kMostElements; });
}
template <typename Io>
void fields(Io& io, Ref<Io, TensorId> m) {
  io.number(m.id);
  io.list(m.server_load, 8, [&](auto& bytes) { io.number(bytes); });
  io.require([&] { return m.id != 0 && m.id < (1U << 30); });
}

template <typename Io>
void fields(Io& io, Ref<Io, Join> m) {
  fields(io, m.node);
  io.number(m.workers);
  io.number(m.servers);
  io.number(m.patience_ms);
}
template <typename Io>
void fields(Io& io, Ref<Io, Welcome> m) {
  io.number(m.you);
  io.number(m.silence_ms);
  fields(io, m.membership);
  io.require([&] { return m.membership.by_id(m.you) != nullptr && m.silence_ms > 0; });
}
template <typename Io>
void fields(Io& io, Ref<Io, Refused> m) {
  io.code(m.code);
  io.text(m.text, kMostTextBytes);
  io.text(m.hint, kMostTextBytes);
}
template <typename Io>
void fields(Io&, Ref<Io, Heartbeat>) {}
template <typename Io>
void fields(Io& io, Ref<Io, Barrier> m) {
  io.number(m.call);
  io.number(m.group);
}
template <typename Io>
void fields(Io& io, Ref<Io, Done> m) {
  io.number(m.call);
}
template <typename Io>
void fields(Io& io, Ref<Io, Failed> m) {
  io.number(m.call);
  io.code(m.code);
  io.text(m.text, kMostTextBytes);
  io.text(m.hint, kMostTextBytes);
}
template <typename Io>
void fields(Io& io, Ref<Io, Cancel> m) {
  io.number(m.call);
}
template <typename Io>
void fields(Io& io, Ref<Io, Missing> m) {
  io.number(m.call);
  io.text(m.text, kMostTextBytes);
}
template <typename Io>
void fields(Io& io, Ref<Io, Declare> m) {
  io.number(m.call);
  io.list(m.tensors, 21, [&](auto& tensor) { fields(io, tensor); });
}
template <typename Io>
void fields(Io& io, Ref<Io, Declared> m) {
  io.number(m.call);
  io.list(m.tensors, 8, [&](auto& tensor) { fields(io, tensor); });
}
template <typename Io>
void fields(Io& io, Ref<Io, TensorFailed> m) {
  io.number(m.tensor);
  io.text(m.text, kMostTextBytes);
}
template <typename Io>
void fields(Io& io, Ref<Io, NewGroup> m) {
  io.number(m.call);
  io.list(m.ranks, 4, [&](auto& rank) { io.number(rank); });
  io.text(m.name, kMostNameBytes);
}
template <typename Io>
void fields(Io& io, Ref<Io, GroupInfo> m) {
  fields(io, m.group);
}
template <typename Io>
void fields(Io& io, Ref<Io, GroupAck> m) {
  io.number(m.group);
}
template <typename Io>
void fields(Io& io, Ref<Io, GroupReady> m) {
  io.number(m.call);
  io.number(m.group);
}
template <typename Io>
void fields(Io& io, Ref<Io, Leave> m) {
  io.number(m.call);
  io.number(m.lost_node);
  io.text(m.reason, kMostTextBytes);
}
template <typename Io>
void fields(Io& io, Ref<Io, AllLeft> m) {
  io.flag(m.well);
}
template <typename Io>
void fields(Io& io, Ref<Io, PeerLost> m) {
  io.number(m.node);
  io.text(m.text, kMostTextBytes);
}

template <typename Io>
void fields(Io& io, Ref<Io, Suspect> m) {
  io.number(m.node);
}
template <typename Io>
void fields(Io& io, Ref<Io, Reachable> m) {
  io.number(m.node);
}

template <typename T>
std::optional<Message> decode_as(Take io) {
  T message;
  fields(io, message);
  if (!io.done()) return std::nullopt;
  return Message(std::move(message));
}

// One decoder per type, in the order of the variant.
template <std::size_t... kIndex>
constexpr auto decoders(std::index_sequence<kIndex...>) {
  return std::array{&decode_as<std::variant_alternative_t<kIndex, Message>>...};
}
constexpr auto kDecoders = decoders(std::make_index_sequence<std::variant_size_v<Message>>());

}  // namespace

Bytes encode(const Message& message) {
  Put io;
  io.number(static_cast<std::uint8_t>(message.index()));
  std::visit([&](const auto& alternative) { fields(io, alternative); }, message);
  return io.take();
}

std::optional<Message> decode(std::span<const std::byte> bytes) {
  if (bytes.empty() || bytes.size() > kMostMessageBytes) return std::nullopt;
  const auto type = static_cast<std::size_t>(bytes[0]);
  if (type >= kDecoders.size()) return std::nullopt;
  return kDecoders[type](Take(bytes.subspan(1)));
}

void check_spec(const TensorSpec& spec) {
  const std::string who = "tensor '" + spec.name.substr(0, 64) + "'";
  if (spec.name.empty() || spec.name.size() > kMostNameBytes) {
    throw Error(ErrorCode::kInvalidArgument, who + " has a name of " + std::to_string(spec.name.size()) + " bytes",
                "use a name of 1 to " + std::to_string(kMostNameBytes) + " bytes");
  }
  if (spec.shape.size() > kMostShapeBytes || spec.count > kMostElements) {
    throw Error(ErrorCode::kInvalidArgument, who + " has a shape beyond the limit",
                "declare at most 2^48 elements and a shape text of at most 1024 bytes");
  }
  if (size_of(Dtype{spec.dtype}) == 0) {
    throw Error(ErrorCode::kInvalidArgument, who + " has the unknown element type " + std::to_string(spec.dtype),
                "use an element type of dtype.h");
  }
}

}  // namespace bps::van
