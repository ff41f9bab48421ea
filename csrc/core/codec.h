// SPDX-License-Identifier: Apache-2.0
// The one codec of the project: a message lists its fields once, and encoder, decoder and checks all walk that list.
//
//   struct Barrier {
//     std::uint32_t call = 0;
//     std::string reason;
//     static constexpr void fields(auto& io, auto& m) {
//       io(m.call);
//       io.bounded(m.reason, kMostReasonBytes);
//       io.require([&] { return m.call != 0; });
//     }
//   };
//   Bytes bytes = codec::encode(barrier);
//   std::optional<Barrier> back = codec::decode<Barrier>(bytes);
//
// io(...) takes integers, bools, enums, byte arrays, nested messages, vectors of any of these, and variants of
// messages. A message that names another one as its Packed travels as that: pack() makes it, and unpack() takes only
// what pack() makes. io.bounded() takes strings and bytes with a largest size. io.require() states what else holds for
// a valid message.
//
// Numbers travel little-endian, without padding. A bool is one byte, 0 or 1. An enum has its underlying type, and
// is_valid(value), found next to the enum, says which values exist. Strings, bytes and vectors follow a 32-bit count. A
// variant is one byte, the position of the alternative, and then that alternative: append alternatives, never insert.
//
// decode() reads untrusted bytes. It returns nothing unless the bytes are exactly one valid message, it allocates no
// more than a small multiple of the bytes it has been given, and it never reads beyond them. What it accepts is what
// encode() would have written.
//
// A message of fixed size (one without strings, bytes and vectors) becomes a std::array whose size, kSize<T>, is known
// at compile time. Where the list proves that the struct lies in memory as it lies on the wire (Plain), the data path
// sends and receives the struct itself: bytes_of(), writable_bytes_of(), accepts().
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "core/bytes.h"
#include "core/codec_io.h"

namespace bps::codec {

template <typename T>
concept Fixed = std::is_trivially_copyable_v<T> && !Variant<T>;
template <Fixed T>
inline constexpr std::size_t kSize = size_of_message(T{});

template <Fixed T>
constexpr std::array<std::byte, kSize<T>> encode(const T& message) {
  std::array<std::byte, kSize<T>> bytes{};
  Put io(bytes.data());
  io(message);
  return bytes;
}
template <typename T>
Bytes encode(const T& message) {
  Bytes bytes(size_of_message(message));
  Put io(bytes.data());
  io(message);
  return bytes;
}

template <typename T>
std::optional<T> decode(std::span<const std::byte> bytes) {
  std::optional<T> message(std::in_place);
  Take io(bytes);
  io(*message);
  if (!io.done()) message.reset();
  return message;
}
// Decodes bytes that somebody has padded: only the first kSize<T> of them count.
template <Fixed T>
std::optional<T> decode_front(std::span<const std::byte> bytes) {
  return bytes.size() < kSize<T> ? std::nullopt : decode<T>(bytes.first(kSize<T>));
}

// Returns true when the struct lies in memory as its list writes it: a struct whose bytes are 1, 2, 3, ... encodes to
// 1, 2, 3, ...
template <Fixed T>
consteval bool is_plain() {
  if constexpr (!std::has_unique_object_representations_v<T> || kSize<T> != sizeof(T)) {
    return false;
  } else {
    std::array<std::byte, sizeof(T)> bytes{};
    for (std::size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<std::byte>(i + 1);
    return encode(std::bit_cast<T>(bytes)) == bytes;
  }
}
template <typename T>
concept Plain = Fixed<T> && is_plain<T>();

template <Plain T>
std::span<const std::byte, sizeof(T)> bytes_of(const T& message) {
  return std::as_bytes(std::span<const T, 1>(&message, 1));
}
// Returns where to write bytes from a peer. Afterwards accepts() says whether they are a valid message.
template <Plain T>
std::span<std::byte, sizeof(T)> writable_bytes_of(T& message) {
  return std::as_writable_bytes(std::span<T, 1>(&message, 1));
}
template <Plain T>
constexpr bool accepts(const T& message) {
  Check io;
  io(message);
  return io.good();
}

}  // namespace bps::codec
