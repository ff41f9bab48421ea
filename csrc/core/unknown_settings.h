// SPDX-License-Identifier: Apache-2.0
// Finds variables of the environment that look like settings of this library and have no effect: misspelt ones, removed
// ones, and those of BytePS that are ignored on purpose.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bps {

struct SettingNote {
  std::string variable;
  std::string text;  // a sentence that names the variable
  bool warning;      // false: the variable is harmless here
};

// Returns what to say about the BPS_*, BYTEPS_* and DMLC_* variables among `variables` ("NAME=value"). Empty values
// count as unset.
std::vector<SettingNote> check_variables(std::span<const std::string> variables);
// Does the same for the environment of this process.
std::vector<SettingNote> check_environment();
// Logs check_environment(), on the first call of the process only: warnings at WARNING, the rest at INFO.
void log_unknown_settings();

// Returns why a setting that once existed was removed; "" for any other name.
std::string_view removed_setting(std::string_view name);
// Returns the setting or alias that is spelt most like `name`, or "" when none is similar.
std::string nearest_setting(std::string_view name);

}  // namespace bps
