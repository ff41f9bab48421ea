// SPDX-License-Identifier: Apache-2.0
// Writes one line per event on standard error: "bps WARNING [rank 1] text". BPS_LOG_LEVEL sets the level; the data path
// logs nothing above DEBUG. A library must not bring a logging framework into a training process.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace bps {

enum class LogLevel : unsigned char { kError, kWarning, kInfo, kDebug };

void set_log(LogLevel level, std::string who);
// Takes ERROR, WARNING, INFO or DEBUG in either case, and BytePS's FATAL and TRACE. Returns nothing for other text.
std::optional<LogLevel> parse_log_level(std::string_view text);
bool log_enabled(LogLevel level);
void log_line(LogLevel level, const std::string& text);

inline void log_warning(const std::string& text) {
  log_line(LogLevel::kWarning, text);
}
inline void log_info(const std::string& text) {
  log_line(LogLevel::kInfo, text);
}
inline void log_debug(const std::string& text) {
  log_line(LogLevel::kDebug, text);
}

// Names the calling thread (at most 15 characters), as seen in top -H and in a debugger.
void name_thread(const std::string& name);

}  // namespace bps
