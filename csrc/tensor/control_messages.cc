#include "tensor/control_messages.h"

namespace bps::tensor {
namespace {

enum class Kind : std::uint8_t { kAttach = 1, kCredits, kPushFailed, kWhoIsMissing, kMissing };

struct Encoder {
  Writer out;
  void start(Kind kind) { out.put(static_cast<std::uint8_t>(kind)); }
  void operator()(const Attach& m) {
    start(Kind::kAttach);
    out.put(m.largest_payload).put(static_cast<std::uint8_t>(m.needs_slots)).put(m.data_endpoints);
  }
  void operator()(const Credits& m) {
    start(Kind::kCredits);
    out.put(static_cast<std::uint32_t>(m.slots.size()));
    for (const SlotCredit& slot : m.slots) out.put(slot.slot).put(slot.key).put(slot.address).put(slot.capacity);
  }
  void operator()(const PushFailed& m) {
    start(Kind::kPushFailed);
    out.put(m.immediate).put(m.code).put(m.what).put(m.hint);
  }
  void operator()(const WhoIsMissing& m) {
    start(Kind::kWhoIsMissing);
    out.put(m.immediate).put(m.tensor).put(m.partition).put(m.round);
  }
  void operator()(const Missing& m) {
    start(Kind::kMissing);
    out.put(m.immediate).put(static_cast<std::uint32_t>(m.ranks.size()));
    for (const std::uint32_t rank : m.ranks) out.put(rank);
  }
};

}  // namespace

Bytes encode(const ControlMessage& message) {
  Encoder encoder;
  std::visit(encoder, message);
  return encoder.out.take();
}

std::optional<ControlMessage> decode_control_message(std::span<const std::byte> bytes) {
  Reader in(bytes);
  std::optional<ControlMessage> message;
  switch (static_cast<Kind>(in.get<std::uint8_t>())) {
    case Kind::kAttach: {
      Attach m;
      m.largest_payload = in.get<std::uint64_t>();
      const auto needs = in.get<std::uint8_t>();
      if (needs > 1) return std::nullopt;
      m.needs_slots = needs == 1;
      m.data_endpoints = in.get<std::uint8_t>();
      message = m;
      break;
    }
    case Kind::kCredits: {
      Credits m;
      const auto count = in.get<std::uint32_t>();
      if (!in.fits(count, 28)) return std::nullopt;
      m.slots.resize(count);
      for (SlotCredit& slot : m.slots) {
        slot.slot = in.get<std::uint32_t>();
        slot.key = in.get<std::uint64_t>();
        slot.address = in.get<std::uint64_t>();
        slot.capacity = in.get<std::uint64_t>();
      }
      message = std::move(m);
      break;
    }
    case Kind::kPushFailed: {
      PushFailed m;
      m.immediate = in.get<std::uint32_t>();
      m.code = in.get<std::uint8_t>();
      m.what = in.get_string();
      m.hint = in.get_string();
      message = std::move(m);
      break;
    }
    case Kind::kWhoIsMissing: {
      WhoIsMissing m;
      m.immediate = in.get<std::uint32_t>();
      m.tensor = in.get<std::uint32_t>();
      m.partition = in.get<std::uint32_t>();
      m.round = in.get<std::uint32_t>();
      message = m;
      break;
    }
    case Kind::kMissing: {
      Missing m;
      m.immediate = in.get<std::uint32_t>();
      const auto count = in.get<std::uint32_t>();
      if (!in.fits(count, 4)) return std::nullopt;
      for (std::uint32_t i = 0; i < count; ++i) m.ranks.push_back(in.get<std::uint32_t>());
      message = std::move(m);
      break;
    }
  }
  return in.done() ? message : std::nullopt;
}

}  // namespace bps::tensor
