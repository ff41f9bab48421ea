// SPDX-License-Identifier: Apache-2.0
// The file of those who may ask a pool for servers: each line has a user and a key.
//
//   alice 8f5b...   (64 digits, random)
//
// The pool has the lines of all users, each user a file with one line. A user proves to know the key, and the pool that
// it knows it, too, by the handshake of all connections (transport/handshake.h); the key never travels.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/handshake.h"

namespace bps::pool {

// Sees the jobs of all users, and may end them.
inline constexpr std::string_view kOperator = "operator";

struct UserKey {
  std::string user;
  std::string key;
};

// Throws kInvalidArgument, with the number of the line, for what is no line of such a file, or a user who is there
// twice; and unless the file is of this user, or of root, and closed to all others.
std::vector<UserKey> read_keys(const std::string& path);
// The only line of the file, or that of `user`. Throws kInvalidArgument where there is none.
UserKey read_key(const std::string& path, const std::string& user);
// A line for a user. Throws kInvalidArgument for a name that is none: letters, digits, and ._@- after the first.
std::string new_line(const std::string& user);

transport::Credentials credentials_of(const UserKey& user);

}  // namespace bps::pool
