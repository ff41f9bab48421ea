// SPDX-License-Identifier: Apache-2.0
#include "core/log.h"

#include <pthread.h>

#include <atomic>
#include <cctype>
#include <cstdio>
#include <mutex>

#include "core/fork.h"

namespace bps {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kWarning};
std::mutex g_mutex;
std::string g_who;  // guarded by g_mutex

constexpr const char* kNames[] = {"ERROR", "WARNING", "INFO", "DEBUG"};

[[maybe_unused]] const bool g_held = (hold_across_fork(g_mutex), true);

}  // namespace

void set_log(LogLevel level, std::string who) {
  g_level = level;
  const std::lock_guard lock(g_mutex);
  g_who = std::move(who);
}

std::optional<LogLevel> parse_log_level(std::string_view text) {
  std::string name(text);
  for (char& c : name) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  if (name == "ERROR" || name == "FATAL") return LogLevel::kError;
  if (name == "INFO") return LogLevel::kInfo;
  if (name == "DEBUG" || name == "TRACE") return LogLevel::kDebug;
  if (name == "WARNING" || name == "WARN") return LogLevel::kWarning;
  return std::nullopt;
}

bool log_enabled(LogLevel level) {
  return level <= g_level.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, const std::string& text) {
  if (!log_enabled(level)) return;
  const std::lock_guard lock(g_mutex);
  std::fprintf(stderr, "bps %s [%s] %s\n", kNames[static_cast<int>(level)], g_who.c_str(), text.c_str());
}

void name_thread(const std::string& name) {
  ::pthread_setname_np(::pthread_self(), name.substr(0, 15).c_str());
}

}  // namespace bps
