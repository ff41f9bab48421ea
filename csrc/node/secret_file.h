// SPDX-License-Identifier: Apache-2.0
// Reads and makes files that hold a secret.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace bps::node {

// A shorter secret can be guessed: anybody who connects gets something to test guesses against.
inline constexpr std::size_t kLeastSecretBytes = 16;

// Returns the text of the file, without white space at the ends. Throws kInvalidArgument unless it is a regular file of
// this user (or of root) that nobody else can read or write.
std::string read_secret_file(const std::string& path);

// Returns the text of a file with several secrets, which must be as private. `setting` named the file. Throws for a
// text of more than `most` bytes.
std::string read_private_file(const std::string& path, std::string_view setting, std::size_t most);

// Returns the secret of this user on this host, made at random by the first process that needs it. The file lies in
// $XDG_RUNTIME_DIR/bps_rdma, else in ~/.config/bps_rdma, else in /tmp/bps_rdma-UID: the first folder that can be used.
// Throws kInvalidArgument where the file or its folder belongs to another user or is open to others.
std::string host_secret();

}  // namespace bps::node
