// SPDX-License-Identifier: Apache-2.0
#include "compress/parameters.h"

#include <charconv>
#include <sstream>
#include <utility>

#include "core/error.h"

namespace bps::compress {
namespace {

[[noreturn]] void refuse(std::string_view what, std::string_view rest, std::string hint) {
  std::string text = "compression: '";
  text.append(what).append("' ").append(rest);
  throw Error(ErrorCode::kInvalidArgument, text, std::move(hint));
}

template <typename T>
T parse(const std::string& key, const std::string& text, T smallest, T largest) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  if (!is_number || !(value >= smallest && value <= largest)) {
    std::ostringstream range;
    range << "give a number from " << smallest << " to " << largest;
    refuse(key + "=" + text, "makes no sense", range.str());
  }
  return value;
}

}  // namespace

Parameters::Parameters(std::string_view text) {
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view one = text.substr(0, comma);
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
    const std::size_t equals = one.find('=');
    if (equals == std::string_view::npos || equals == 0 || equals + 1 == one.size()) {
      refuse(one, "is no parameter", "write KEY=VALUE, as in 'topk:k=0.01'");
    }
    const std::string key(one.substr(0, equals));
    if (!values_.emplace(key, one.substr(equals + 1)).second) refuse(key, "is given twice", "give it once");
  }
}

std::string Parameters::take(const std::string& key) {
  known_ += (known_.empty() ? "" : ", ") + key;
  const auto found = values_.find(key);
  if (found == values_.end()) return {};
  std::string value = std::move(found->second);
  values_.erase(found);
  return value;
}

double Parameters::take_number(const std::string& key, double otherwise, double smallest, double largest) {
  const std::string text = take(key);
  return text.empty() ? otherwise : parse(key, text, smallest, largest);
}

std::uint64_t Parameters::take_integer(const std::string& key, std::uint64_t otherwise, std::uint64_t smallest,
                                       std::uint64_t largest) {
  const std::string text = take(key);
  return text.empty() ? otherwise : parse(key, text, smallest, largest);
}

bool Parameters::take_flag(const std::string& key, bool otherwise) {
  return take_integer(key, otherwise ? 1 : 0, 0, 1) == 1;
}

std::size_t Parameters::take_choice(const std::string& key, std::string_view choices) {
  const std::string text = take(key);
  if (text.empty()) return 0;
  const std::string all(choices);
  for (std::size_t index = 0; !choices.empty(); ++index) {
    const std::size_t bar = choices.find('|');
    if (choices.substr(0, bar) == text) return index;
    choices.remove_prefix(bar == std::string_view::npos ? choices.size() : bar + 1);
  }
  refuse(key + "=" + text, "makes no sense", "give one of " + all);
}

void Parameters::end(std::string_view method) const {
  if (values_.empty()) return;
  refuse(method, "has no parameter '" + values_.begin()->first + "'",
         known_.empty() ? "it has none" : "it has " + known_);
}

}  // namespace bps::compress
