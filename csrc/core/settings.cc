// SPDX-License-Identifier: Apache-2.0
#include "core/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "core/clock.h"
#include "core/error.h"
#include "core/unknown_settings.h"
#include "core/words.h"

namespace bps {
namespace {

[[noreturn]] void reject(const Setting& setting, const SettingValues::Value& value) {
  const bool from_variable = value.source != "default" && value.source != "argument";
  const std::string where = from_variable ? value.source : std::string(setting.name);
  const std::string shown = setting.secret ? "(hidden)" : "'" + value.text + "'";
  const std::string wanted = setting.range.describe();
  throw Error(ErrorCode::kInvalidArgument, where + "=" + shown + " is not " + wanted,
              "set " + where + " to " + wanted + ", or unset it");
}

[[noreturn]] void reject_name(const std::string& name) {
  if (const std::string_view why = removed_setting(name); !why.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "the setting " + name + " was removed: " + std::string(why),
                "leave it out");
  }
  const std::string nearest = nearest_setting(name);
  throw Error(ErrorCode::kInvalidArgument,
              "there is no setting " + name + (nearest.empty() ? "" : "; did you mean " + nearest + "?"),
              "`bps config` lists the settings");
}

}  // namespace

const Setting* find_setting(std::string_view name) {
  const auto table = settings_table();
  const auto found = std::ranges::find(table, name, &Setting::name);
  return found == table.end() ? nullptr : &*found;
}

SettingValues::SettingValues()
    : SettingValues([](const std::string& variable) -> std::optional<std::string> {
        const char* value = std::getenv(variable.c_str());
        return value == nullptr ? std::nullopt : std::optional<std::string>(value);
      }) {}

SettingValues::SettingValues(Lookup lookup) {
  for (const Setting& setting : settings_table()) {
    Value value{std::string(setting.fallback), "default"};
    for_each_word(std::string(setting.name) + " " + std::string(setting.aliases), ' ', [&](std::string_view variable) {
      if (value.source != "default") return;
      // An empty variable is an unset one: launch scripts often export names they have no value for.
      const auto found = lookup(std::string(variable));
      if (found && !found->empty()) value = {*found, std::string(variable)};
    });
    values_[std::string(setting.name)] = value;
  }
}

void SettingValues::set(const std::string& name, const std::string& value, const std::string& source) {
  const auto found = values_.find(name);
  if (found == values_.end()) reject_name(name);
  found->second = {value, source};
}

const SettingValues::Value& SettingValues::value(std::string_view name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) reject_name(std::string(name));
  return found->second;
}

void SettingValues::store(const Setting& setting, Settings& into) const {
  const Value& found = value(setting.name);
  if (!setting.store(into, setting.range, found.text)) reject(setting, found);
}

Settings SettingValues::parse() const {
  Settings settings;
  for (const Setting& setting : settings_table()) store(setting, settings);
  settings.worker.partition_given = value("BPS_PARTITION_BYTES").source != "default";
  return settings;
}

std::int64_t SettingValues::integer(std::string_view name) const {
  const Value& found = value(name);
  std::int64_t number = 0;
  if (!read_whole(find_setting(name)->range, found.text, number)) reject(*find_setting(name), found);
  return number;
}

double SettingValues::seconds(std::string_view name) const {
  const Value& found = value(name);
  double number = 0;
  if (!read_value(find_setting(name)->range, found.text, number)) reject(*find_setting(name), found);
  return number;
}

std::string Range::describe() const {
  switch (kind) {
    case Kind::kText: return "text";
    case Kind::kFlag: return "1 or 0";
    case Kind::kNumber: return "a number above 0";
    case Kind::kSeconds: return "a number of seconds above 0 (inf: no limit)";
    case Kind::kPorts: return "a range of ports, as in 40000-40100";
    case Kind::kWhole:
      if (highest == INT64_MAX) return "a whole number of at least " + std::to_string(lowest);
      return "a whole number from " + std::to_string(lowest) + " to " + std::to_string(highest);
    case Kind::kWords: break;
  }
  std::string all;
  for_each_word(words, ' ', [&](std::string_view word) { all += (all.empty() ? "" : ", ") + std::string(word); });
  if (list_words.empty()) return "one of " + all;
  std::string several;
  for_each_word(list_words, ' ',
                [&](std::string_view word) { several += (several.empty() ? "" : ", ") + std::string(word); });
  return "one of " + all + ", or of " + several + ", or several of the latter, separated by commas";
}

bool read_whole(const Range& range, std::string_view text, std::int64_t& into) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, into);
  return error == std::errc() && stop == end && into >= range.lowest && into <= range.highest;
}

bool read_value(const Range& range, std::string_view text, std::string& into) {
  into = text;
  if (range.kind != Range::Kind::kWords || has_word(range.words, text)) return true;
  if (range.list_words.empty()) return text.empty();
  bool good = !text.empty();
  for_each_part(text, ',', [&](std::string_view part) { good = good && has_word(range.list_words, part); });
  return good;
}

bool read_value(const Range&, std::string_view text, bool& into) {
  into = has_word("1 true yes on", text);
  return into || text.empty() || has_word("0 false no off", text);
}

bool read_value(const Range&, std::string_view text, double& into) {
  const std::string terminated(text);
  char* stop = nullptr;
  into = std::strtod(terminated.c_str(), &stop);
  if (text.empty() || *stop != '\0' || !(into > 0)) return false;  // nan is not above 0
  into = std::min(into, kForever_s);
  return true;
}

bool read_value(const Range&, std::string_view text, LogLevel& into) {
  const auto level = parse_log_level(text);
  if (level) into = *level;
  return level.has_value();
}

bool read_value(const Range&, std::string_view text, PortRange& into) {
  into = {};
  if (text.empty()) return true;
  const std::size_t dash = text.find('-');
  const auto read = [](std::string_view part, std::uint16_t& port) {
    const char* end = part.data() + part.size();
    const auto [stop, error] = std::from_chars(part.data(), end, port);
    return error == std::errc() && stop == end && port != 0;
  };
  return dash != std::string_view::npos && read(text.substr(0, dash), into.first) &&
         read(text.substr(dash + 1), into.last) && into.first <= into.last;
}

}  // namespace bps
