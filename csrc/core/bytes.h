// Little-endian encoding of control messages: a writer that appends and a reader that cannot overrun.
//
// Reader never throws: a read past the end sets ok() to false and yields zero or an empty string, so a decoder reads
// all fields and checks once.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bps {

static_assert(std::endian::native == std::endian::little, "big-endian hosts need byte swaps in Writer and Reader");

using Bytes = std::vector<std::byte>;

// memcpy that may be told of nothing: it wants valid pointers even for no bytes, and an empty span has none.
inline void copy_bytes(std::span<const std::byte> from, void* to) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}
inline std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

class Writer {
 public:
  template <std::integral T>
  Writer& put(T value) {
    return put_raw(std::as_bytes(std::span(&value, 1)));
  }
  Writer& put(std::string_view text) { return put_bytes(as_bytes(text)); }
  Writer& put_bytes(std::span<const std::byte> bytes) {
    put(static_cast<std::uint32_t>(bytes.size()));
    return put_raw(bytes);
  }
  // Not inlined, and no insert(): gcc 12 then sees an overflow that is none (-Wstringop-overflow).
  [[gnu::noinline]] Writer& put_raw(std::span<const std::byte> bytes) {
    const std::size_t size = out_.size();
    out_.resize(size + bytes.size());
    copy_bytes(bytes, out_.data() + size);
    return *this;
  }
  Bytes take() { return std::move(out_); }

 private:
  Bytes out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  template <std::integral T>
  T get() {
    T value{};
    if (const auto bytes = get_raw(sizeof value); !bytes.empty()) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string get_string() {
    const auto bytes = get_bytes();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  std::span<const std::byte> get_bytes() { return get_raw(get<std::uint32_t>()); }
  std::span<const std::byte> get_raw(std::size_t size) {
    if (size > left_.size()) {
      ok_ = false;
      left_ = {};
      return {};
    }
    const auto bytes = left_.first(size);
    left_ = left_.subspan(size);
    return bytes;
  }
  // For a count that announces `each` bytes or more per item: false (and not ok) when they cannot be there.
  bool fits(std::uint64_t count, std::size_t each) {
    if (count > left_.size() / each) ok_ = false;
    return ok_;
  }
  bool ok() const { return ok_; }
  bool done() const { return ok_ && left_.empty(); }

 private:
  std::span<const std::byte> left_;
  bool ok_ = true;
};

}  // namespace bps
