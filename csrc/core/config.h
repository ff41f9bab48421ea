// Every setting of the library in one table: name, the names that BytePS, NCCL and torchrun users know, default, help.
//
// A value comes from, in this order: set() (arguments of init()), BPS_*, the aliases in the order of the table, the
// default. Each value remembers its source; `bps config` prints them all. Reading never fails; a value that does not
// parse throws kInvalidArgument naming the variable it came from.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bps {

struct Setting {
  std::string_view name;     // BPS_SOMETHING
  std::string_view aliases;  // space-separated
  std::string_view fallback;
  std::string_view help;
};

class Config {
 public:
  using Lookup = std::function<std::optional<std::string>(const std::string& variable)>;

  static std::vector<Setting> table();

  Config();                        // from the environment of this process
  explicit Config(Lookup lookup);  // from anything else, for tests

  void set(const std::string& name, const std::string& value, const std::string& source);

  std::string text(std::string_view name) const;
  std::int64_t integer(std::string_view name, std::int64_t lowest, std::int64_t highest) const;
  double seconds(std::string_view name) const;  // positive
  bool flag(std::string_view name) const;       // 1/0, true/false, yes/no, on/off
  bool is_default(std::string_view name) const { return value(name).source == "default"; }

  struct Value {
    std::string text;
    std::string source;  // "default", "argument", or the variable's name
  };
  const Value& value(std::string_view name) const;

 private:
  std::map<std::string, Value, std::less<>> values_;
};

}  // namespace bps
