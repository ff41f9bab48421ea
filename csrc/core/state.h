// SPDX-License-Identifier: Apache-2.0
// Holds a state that changes only along the arrows of its diagram; docs/internals.md lists the diagrams.
//
// A change without an arrow is a defect of this program. It ends the process with a line that names both states,
// because a round in a wrong state could deliver a wrong sum in silence. The check is one test of a constant.
//
// Beside an enum stand arrows_of(), which has for each state those that may follow it, and name_of(), which names what
// is in that state. A state belongs to its owner; other threads may read a State<Enum, std::atomic<Enum>>.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace bps {

// Returns the states that may follow, as bits.
constexpr std::uint16_t arrows_to(auto... states) {
  return static_cast<std::uint16_t>(((1U << static_cast<unsigned>(states)) | ... | 0U));
}

// Turns them round: returns for each state those that it may follow.
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

template <typename Enum>
inline constexpr auto kArrowsFrom = arrows_from(arrows_of(Enum{}));

template <typename Enum>
constexpr bool has_arrow(Enum from, Enum to) {
  return (kArrowsFrom<Enum>[static_cast<unsigned>(to)] >> static_cast<unsigned>(from) & 1U) != 0;
}

template <typename Enum>
void check_arrow(Enum from, Enum to) {
  if (has_arrow(from, to)) [[likely]]
    return;
  end_process(name_of(to), static_cast<unsigned>(from), static_cast<unsigned>(to));
}

// Begins with the first state of the enum.
template <typename Enum, typename Kept = Enum>
class State {
 public:
  Enum now() const { return now_; }
  bool is(Enum state) const { return now() == state; }
  bool is_between(Enum first, Enum last) const {
    const Enum now = now_;
    return first <= now && now <= last;
  }
  void enter(Enum next) {
    check_arrow(now(), next);
    now_ = next;
  }

 private:
  Kept now_{};
};

}  // namespace bps
