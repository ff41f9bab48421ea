// SPDX-License-Identifier: Apache-2.0
#include "van/origin.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "core/words.h"

namespace bps::van {
namespace {

std::vector<std::string_view> pieces_of(const Origin& origin) {
  std::vector<std::string_view> pieces;
  for_each_part(origin.command, Origin::kCut, [&](std::string_view piece) { pieces.push_back(piece); });
  return pieces;
}

bool are_alike(std::string_view a, std::string_view b) {
  if (a.empty() || b.empty()) return a == b;
  return a.substr(1) == b.substr(1) || (a.front() == '#' && b.front() == '#');
}

}  // namespace

bool may_belong_together(const Origin& a, const Origin& b) {
  return a.command.empty() || b.command.empty() || std::ranges::equal(pieces_of(a), pieces_of(b), are_alike);
}

std::string command_of(const Origin& origin) {
  std::string text;
  for (const std::string_view piece : pieces_of(origin)) text += piece.substr(piece.empty() ? 0 : 1);
  return text;
}

}  // namespace bps::van
