// SPDX-License-Identifier: Apache-2.0
#include "core/state.h"

#include <cstdlib>
#include <string>

#include "core/log.h"

namespace bps {

void end_process(const char* what, unsigned from, unsigned to) noexcept {
  log_line(LogLevel::kError, std::string("defect: the state of ") + what + " cannot change from " +
                                 std::to_string(from) + " to " + std::to_string(to) + "; report this as a bug");
  std::abort();
}

}  // namespace bps
