// One line per event on standard error: "bps WARNING [rank 1] text". Levels from BPS_LOG_LEVEL; never used above debug
// on the data path. A library must not bring a logging framework into a training process.
#pragma once

#include <string>
#include <string_view>

namespace bps {

enum class LogLevel { kError, kWarning, kInfo, kDebug };

void set_log(LogLevel level, std::string who);
LogLevel parse_log_level(std::string_view text);  // in either case; unknown names mean WARNING
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
