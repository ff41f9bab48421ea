// SPDX-License-Identifier: Apache-2.0
// Defines the walkers behind codec.h: they measure, write, read or check each field of a message.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

#include "core/bytes.h"

namespace bps::codec {

static_assert(std::endian::native == std::endian::little, "a big-endian host must swap bytes in Put and Take");

template <typename T>
concept Scalar = std::integral<T> || std::is_enum_v<T>;
template <typename T>
concept Variant = requires { std::variant_size<T>::value; };

// Calls the member function of `io` that handles a field of this type.
template <typename Io, typename T>
constexpr void walk(Io& io, T& field) {
  using Field = std::remove_const_t<T>;
  if constexpr (Scalar<Field>) {
    io.scalar(field);
  } else if constexpr (requires { Field::fields(io, field); }) {
    Field::fields(io, field);
  } else if constexpr (requires { typename Field::Packed; }) {
    io.packed(field);
  } else if constexpr (Variant<Field>) {
    io.variant(field);
  } else if constexpr (requires { std::tuple_size<Field>::value; }) {
    io.array(field);
  } else {
    io.list(field);
  }
}

// Counts bytes.
class Measure {
 public:
  constexpr void operator()(const auto&... field) { (walk(*this, field), ...); }
  template <Scalar T>
  constexpr void scalar(T) {
    size_ += sizeof(T);
  }
  template <std::size_t kCount>
  constexpr void array(const std::array<std::byte, kCount>&) {
    size_ += kCount;
  }
  constexpr void bounded(const auto& text, std::size_t most) {
    size_ += sizeof(std::uint32_t) + std::min(text.size(), most);
  }
  constexpr void list(const auto& items) {
    size_ += sizeof(std::uint32_t);
    for (const auto& item : items) walk(*this, item);
  }
  constexpr void variant(const auto& value) {
    size_ += sizeof(std::uint8_t);
    std::visit([&](const auto& alternative) { walk(*this, alternative); }, value);
  }
  void packed(const auto& message) { (*this)(message.pack()); }
  constexpr void require(auto) {}
  constexpr std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
};

// Writes into memory that Measure has found to be large enough.
class Put {
 public:
  explicit constexpr Put(std::byte* to) : to_(to) {}

  constexpr void operator()(const auto&... field) { (walk(*this, field), ...); }
  template <Scalar T>
  constexpr void scalar(T value) {
    array(std::bit_cast<std::array<std::byte, sizeof(T)>>(value));
  }
  template <std::size_t kCount>
  constexpr void array(const std::array<std::byte, kCount>& bytes) {
    to_ = std::copy_n(bytes.begin(), kCount, to_);
  }
  void bounded(const auto& text, std::size_t most) {
    const std::size_t size = std::min(text.size(), most);
    scalar(static_cast<std::uint32_t>(size));
    copy_bytes(std::as_bytes(std::span(text)).first(size), to_);
    to_ += size;
  }
  void list(const auto& items) {
    scalar(static_cast<std::uint32_t>(items.size()));
    for (const auto& item : items) walk(*this, item);
  }
  void variant(const auto& value) {
    scalar(static_cast<std::uint8_t>(value.index()));
    std::visit([&](const auto& alternative) { walk(*this, alternative); }, value);
  }
  void packed(const auto& message) { (*this)(message.pack()); }
  constexpr void require(auto) {}

 private:
  std::byte* to_;
};

template <typename T>
constexpr std::size_t size_of_message(const T& message) {
  Measure io;
  io(message);
  return io.size();
}

// Reads untrusted bytes, and remembers whether everything was as it has to be.
class Take {
 public:
  explicit constexpr Take(std::span<const std::byte> bytes) : left_(bytes) {}

  constexpr void operator()(auto&... field) { (walk(*this, field), ...); }
  template <Scalar T>
  void scalar(T& value) {
    if constexpr (std::same_as<T, bool>) {
      std::uint8_t byte = 0;
      scalar(byte);
      value = byte == 1;
      good_ = good_ && byte <= 1;
    } else {
      copy_bytes(claim(sizeof value), &value);
      if constexpr (std::is_enum_v<T>) good_ = good_ && is_valid(value);
    }
  }
  template <std::size_t kCount>
  void array(std::array<std::byte, kCount>& bytes) {
    copy_bytes(claim(kCount), bytes.data());
  }
  template <typename T>
  void bounded(T& text, std::size_t most) {
    const std::size_t size = count();
    if (size > most) good_ = false;
    const auto bytes = claim(size);
    const auto* first = reinterpret_cast<const typename T::value_type*>(bytes.data());
    text.assign(first, first + bytes.size());
  }
  template <typename T>
  void list(std::vector<T>& items) {
    const std::size_t size = count();
    if (size > left_.size() / size_of_message(T{})) good_ = false;  // there cannot be that many
    if (!good_) return;
    items.resize(size);
    for (T& item : items) {
      walk(*this, item);
      if (!good_) return;
    }
  }
  template <typename... T>
  void variant(std::variant<T...>& value) {
    using Alternative = void (*)(Take&, std::variant<T...>&);
    constexpr Alternative kAlternatives[] = {[](Take& io, std::variant<T...>& v) { io(v.template emplace<T>()); }...};
    std::uint8_t index = 0;
    scalar(index);
    require([&] { return index < sizeof...(T); });
    if (good_) kAlternatives[index](*this, value);
  }
  template <typename T>
  void packed(T& message) {
    typename T::Packed packed;
    (*this)(packed);
    require([&] { return message.unpack(packed); });
  }
  constexpr void require(auto condition) { good_ = good_ && condition(); }
  // Returns true when everything was valid, and nothing is left.
  bool done() const { return good_ && left_.empty(); }

 private:
  std::size_t count() {
    std::uint32_t count = 0;
    scalar(count);
    return count;
  }
  std::span<const std::byte> claim(std::size_t size) {
    good_ = good_ && size <= left_.size();
    if (!good_) return {};
    const auto bytes = left_.first(size);
    left_ = left_.subspan(size);
    return bytes;
  }

  std::span<const std::byte> left_;
  bool good_ = true;
};

// Checks a message that is in memory already.
class Check {
 public:
  constexpr void operator()(const auto&... field) { (walk(*this, field), ...); }
  template <Scalar T>
  constexpr void scalar(T value) {
    if constexpr (std::is_enum_v<T>) require([&] { return is_valid(value); });
  }
  constexpr void array(const auto&) {}
  constexpr void require(auto condition) { good_ = good_ && condition(); }
  constexpr bool good() const { return good_; }

 private:
  bool good_ = true;
};

}  // namespace bps::codec
