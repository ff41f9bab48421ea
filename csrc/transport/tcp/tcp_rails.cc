// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/tcp_rails.h"

#include <charconv>

#include "core/words.h"
#include "transport/rails.h"

namespace bps::transport::tcp {
namespace {

template <typename T>
bool read_number(std::string_view text, T& into) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), into);
  return error == std::errc() && stop == text.data() + text.size();
}

std::optional<TcpAddress> parse_one(std::string_view text) {
  std::vector<std::string_view> parts;
  for_each_part(text, ' ', [&](std::string_view part) { parts.push_back(part); });
  TcpAddress address;
  if (parts.size() != 3 || parts[0].empty() || !read_number(parts[1], address.port) || address.port == 0 ||
      !read_number(parts[2], address.speed)) {
    return std::nullopt;
  }
  address.host = parts[0];
  return address;
}

}  // namespace

std::string to_text(std::span<const TcpAddress> addresses) {
  std::string text;
  for (const TcpAddress& one : addresses) {
    if (!text.empty()) text += ',';
    text += one.host + " " + std::to_string(one.port) + " " + std::to_string(one.speed);
  }
  return text;
}

std::optional<std::vector<TcpAddress>> parse_addresses(std::string_view text) {
  std::vector<TcpAddress> addresses;
  bool good = true;
  for_each_part(text, ',', [&](std::string_view part) {
    const auto one = parse_one(part);
    good = good && one;
    if (one) addresses.push_back(*one);
  });
  if (!good || addresses.size() > kMostRails) return std::nullopt;
  return addresses;
}

std::string in_words(std::string_view text) {
  std::string words;
  const auto addresses = parse_addresses(text);
  for (const TcpAddress& one : addresses ? *addresses : std::vector<TcpAddress>()) {
    words += (words.empty() ? "" : ", ") + one.host + " " + std::to_string(one.port);
  }
  return words;
}

}  // namespace bps::transport::tcp
