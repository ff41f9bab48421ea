// SPDX-License-Identifier: Apache-2.0
// Reads the file of those who may ask a pool for servers. Each line has a user and a key.
//
//   alice 8f5b...   (64 digits, random)
//
// The pool's file has the lines of all users, a user's has one line. A user proves to know the key, and the pool that
// it knows it, too, by the handshake of all connections (transport/handshake.h). The key never travels.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "transport/handshake.h"

namespace bps::pool {

// This user sees the jobs of all users, and may end them.
inline constexpr std::string_view kOperator = "operator";

struct UserKey {
  std::string user;
  std::string key;
};

// Throws kInvalidArgument, with the number of the line, for a line of another form or a user who is there twice. Also
// throws unless the file belongs to this user or root, and is closed to all others.
std::vector<UserKey> read_keys(const std::string& path);
// Returns the only line of the file, or that of `user`. Throws kInvalidArgument where there is none.
UserKey read_key(const std::string& path, const std::string& user);
// Makes a line for a user. Throws kInvalidArgument unless the name has letters, digits, and ._@- after the first.
std::string new_line(const std::string& user);

transport::Credentials credentials_of(const UserKey& user);

}  // namespace bps::pool
