// SPDX-License-Identifier: Apache-2.0
#include "core/error.h"

#include <cerrno>
#include <cstring>

#include "core/limits.h"

namespace bps {

void throw_errno(const std::string& what, const std::string& hint) {
  const int error = errno;
  const std::string text = what + ": " + std::strerror(error);
  if (const auto limit = limit_behind(error))
    throw Error(ErrorCode::kTransport, text + ": " + limit->what, limit->hint);
  throw Error(ErrorCode::kTransport, text, hint);
}

}  // namespace bps
