// SPDX-License-Identifier: Apache-2.0
#include "pool/key_file.h"

#include <algorithm>
#include <cctype>

#include "core/error.h"
#include "core/hmac.h"
#include "core/words.h"
#include "node/secret_file.h"

namespace bps::pool {
namespace {

constexpr std::size_t kMostFileBytes = 1U << 20;
constexpr std::size_t kMostNameBytes = 64;
constexpr const char* kSetting = "BPS_POOL_KEY_FILE";

bool is_user_name(std::string_view name) {
  const auto is_plain = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  return !name.empty() && name.size() <= kMostNameBytes && is_plain(name.front()) &&
         std::ranges::all_of(
             name, [&](char c) { return is_plain(c) || std::string_view("._@-").find(c) != std::string_view::npos; });
}

UserKey parse_line(std::string_view line, const std::string& where) {
  const std::size_t space = line.find_first_of(" \t");
  const std::size_t key = line.find_first_not_of(" \t", space);
  UserKey found{std::string(line.substr(0, space)), key == line.npos ? "" : std::string(line.substr(key))};
  while (!found.key.empty() && std::isspace(static_cast<unsigned char>(found.key.back())) != 0) found.key.pop_back();
  if (is_user_name(found.user) && found.key.size() >= node::kLeastSecretBytes) return found;
  throw Error(ErrorCode::kInvalidArgument,
              where + " is not a user and a key of at least " + std::to_string(node::kLeastSecretBytes) + " characters",
              "make one: bps-server --pool-key USER");
}

}  // namespace

std::vector<UserKey> read_keys(const std::string& path) {
  if (path.empty()) {
    throw Error(ErrorCode::kInvalidArgument, std::string(kSetting) + " is not set",
                "set it to a file with lines that `bps-server --pool-key USER` prints, or, for a user of pools, to one "
                "with the line that the operator of the pool has sent");
  }
  const std::string text = node::read_private_file(path, kSetting, kMostFileBytes);
  std::vector<UserKey> keys;
  std::size_t number = 0;
  for_each_part(text, '\n', [&](std::string_view line) {
    const std::string where = path + ", line " + std::to_string(++number) + ",";
    line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
    if (line.empty() || line.front() == '#') return;
    keys.push_back(parse_line(line, where));
    const auto first = std::ranges::find(keys, keys.back().user, &UserKey::user);
    if (first + 1 == keys.end()) return;
    throw Error(ErrorCode::kInvalidArgument, where + " is the second one of the user " + first->user, "remove one");
  });
  return keys;
}

UserKey read_key(const std::string& path, const std::string& user) {
  std::vector<UserKey> keys = read_keys(path);
  if (keys.size() == 1) return keys.front();
  const auto found = std::ranges::find(keys, user, &UserKey::user);
  if (found != keys.end()) return *found;
  throw Error(ErrorCode::kInvalidArgument, path + " has no line of the user " + user,
              "ask the operator of the pool for one, and set " + std::string(kSetting) + " to a file with it alone");
}

std::string new_line(const std::string& user) {
  if (!is_user_name(user)) {
    throw Error(ErrorCode::kInvalidArgument, "'" + user + "' is not the name of a user",
                "use up to 64 letters, digits, and ._@- after the first");
  }
  Digest bytes;
  random_bytes(bytes);
  std::string line = user + " ";
  for (const std::byte byte : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    line += kDigits[static_cast<unsigned>(byte) >> 4];
    line += kDigits[static_cast<unsigned>(byte) & 15];
  }
  return line;
}

transport::Credentials credentials_of(const UserKey& user) {
  return transport::Credentials::from("bps pool, user " + user.user, user.key);
}

}  // namespace bps::pool
