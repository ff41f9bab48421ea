// SPDX-License-Identifier: Apache-2.0
// Reads the files of a process in /proc.
#pragma once

#include <fstream>
#include <sstream>
#include <string>

namespace bps::pool {

// Returns what a file holds; "" where it cannot be opened or read, as those of a process that ends meanwhile. An
// iterator of the stream would throw an exception then.
inline std::string read_file(const std::string& path) {
  std::ostringstream all;
  all << std::ifstream(path, std::ios::binary).rdbuf();
  return all.str();
}

}  // namespace bps::pool
