// SPDX-License-Identifier: Apache-2.0
// Puts text together from pieces and numbers, at the cost of a copy. Belongs to one thread.
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

namespace bps {

class TraceText {
 public:
  TraceText& add(std::string_view piece) {
    text_ += piece;
    return *this;
  }
  TraceText& add(std::uint64_t number) {
    std::array<char, 20> digits;
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
    return add({digits.data(), static_cast<std::size_t>(end - digits.data())});
  }
  // Writes nanoseconds as microseconds with three decimals.
  TraceText& add_microseconds(std::uint64_t ns) {
    const auto rest = ns % 1000;
    add(ns / 1000);
    const std::array<char, 4> decimals{'.', static_cast<char>('0' + rest / 100),
                                       static_cast<char>('0' + rest / 10 % 10), static_cast<char>('0' + rest % 10)};
    return add({decimals.data(), decimals.size()});
  }

  const std::string& text() const { return text_; }
  void clear() { text_.clear(); }  // keeps the memory

 private:
  std::string text_;
};

}  // namespace bps
