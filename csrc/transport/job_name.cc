// SPDX-License-Identifier: Apache-2.0
#include "transport/job_name.h"

#include <algorithm>

namespace bps::transport {
namespace {

using Text = decltype(SealedName::text);

void apply_stream(const Credentials& credentials, std::span<const std::byte> hello, const Nonce& nonce, Text& text) {
  static_assert(std::tuple_size_v<Text> == 2 * std::tuple_size_v<Digest>);
  std::size_t at = 0;
  for (const std::string_view half : {"name, first half", "name, second half"}) {
    for (const std::byte key : hmac_sha256(credentials.names, {as_bytes(half), hello, nonce})) text[at++] ^= key;
  }
}

Mac sign_name(const Credentials& credentials, std::span<const std::byte> hello, const SealedName& sealed) {
  return hmac_sha256(credentials.names, {as_bytes("name"), hello, sealed.nonce, sealed.text});
}

}  // namespace

SealedName seal_name(const Credentials& credentials, std::span<const std::byte> hello) {
  SealedName sealed;
  random_bytes(sealed.nonce);
  const auto name = as_bytes(credentials.name);
  std::ranges::copy(name.first(std::min(name.size(), sealed.text.size())), sealed.text.begin());
  apply_stream(credentials, hello, sealed.nonce, sealed.text);
  sealed.mac = sign_name(credentials, hello, sealed);
  return sealed;
}

std::optional<std::string> open_name(const Credentials& credentials, std::span<const std::byte> hello,
                                     const SealedName& sealed) {
  if (!equal_constant_time(sealed.mac, sign_name(credentials, hello, sealed))) return std::nullopt;
  Text text = sealed.text;
  apply_stream(credentials, hello, sealed.nonce, text);
  std::string name(as_text(text));
  name.resize(std::min(name.find('\0'), name.size()));
  for (char& each : name) {
    if (static_cast<unsigned char>(each) < 0x20 || each == 0x7f) each = '?';
  }
  return name;
}

}  // namespace bps::transport
