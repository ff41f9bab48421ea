// SPDX-License-Identifier: Apache-2.0
#include "core/error.h"

#include <cerrno>
#include <cstring>

namespace bps {

void throw_errno(const std::string& what, const std::string& hint) {
  throw Error(ErrorCode::kTransport, what + ": " + std::strerror(errno), hint);
}

}  // namespace bps
