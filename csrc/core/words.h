// SPDX-License-Identifier: Apache-2.0
// Reads lists written as one text, such as "shm tcp rdma" or "mlx5_0,mlx5_1", and writes counted nouns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace bps {

// Calls `use` with every part between separators, empty ones too.
template <typename Use>
void for_each_part(std::string_view text, char separator, Use use) {
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    use(text.substr(begin, end - begin));
    begin = end + 1;
  }
}

// Does the same without empty parts.
template <typename Use>
void for_each_word(std::string_view text, char separator, Use use) {
  for_each_part(text, separator, [&](std::string_view part) {
    if (!part.empty()) use(part);
  });
}

inline bool has_word(std::string_view words, std::string_view wanted) {
  bool found = false;
  for_each_word(words, ' ', [&](std::string_view word) { found = found || word == wanted; });
  return found;
}

// Returns "1 worker", "2 workers".
inline std::string counted(std::uint32_t number, std::string_view noun) {
  std::string text = std::to_string(number);
  text.append(" ").append(noun);
  if (number != 1) text.append("s");
  return text;
}

}  // namespace bps
