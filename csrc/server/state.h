// SPDX-License-Identifier: Apache-2.0
// A state that changes along the arrows of its diagram only; docs/internals.md draws them.
//
// A change without an arrow is a defect of this program. It ends the process with a line that names both states,
// because a round in a wrong state could deliver a wrong sum in silence. The check is one test of a constant.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace bps::server {

// For each state of an enum, the states that may follow it, as bits. An enum specialises it.
template <typename Enum>
inline constexpr int kArrows = 0;

constexpr std::uint16_t arrows_to(auto... states) {
  return static_cast<std::uint16_t>(((1U << static_cast<unsigned>(states)) | ... | 0U));
}

// The same the other way round: for each state, those that it may follow.
template <std::size_t states>
constexpr std::array<std::uint16_t, states> arrows_from(const std::array<std::uint16_t, states>& to) {
  std::array<std::uint16_t, states> from{};
  for (std::size_t i = 0; i < states; ++i) {
    for (std::size_t j = 0; j < states; ++j) {
      from[j] = static_cast<std::uint16_t>(from[j] | (to[i] >> j & 1U) << i);
    }
  }
  return from;
}

[[noreturn]] void end_process(const char* what, unsigned from, unsigned to) noexcept;

// Begins with the first state of the enum.
template <typename Enum>
class State {
 public:
  Enum now() const { return now_; }
  bool is(Enum state) const { return now_ == state; }
  bool is_between(Enum first, Enum last) const { return first <= now_ && now_ <= last; }
  static constexpr bool has_arrow(Enum from, Enum to) {
    return (kFrom[static_cast<unsigned>(to)] >> static_cast<unsigned>(from) & 1U) != 0;
  }
  void enter(Enum next) {
    if (!has_arrow(now_, next)) [[unlikely]] {
      end_process(name_of(next), static_cast<unsigned>(now_), static_cast<unsigned>(next));
    }
    now_ = next;
  }

 private:
  static constexpr auto kFrom = arrows_from(kArrows<Enum>);
  Enum now_{};
};

}  // namespace bps::server
