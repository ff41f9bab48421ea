// SPDX-License-Identifier: Apache-2.0
// Reads the parameters of a compression method, as users write them after its name: "k=0.01,seed=7".
//
// The part that knows a parameter takes it; one that is left in the end is an error. Values are kept as text, so that
// all ranks can compare them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace bps::compress {

class Parameters {
 public:
  Parameters() = default;
  // Reads "KEY=VALUE,KEY=VALUE", or "". Throws Error (kInvalidArgument) when it has another form, or a key twice.
  explicit Parameters(std::string_view text);

  // These return `otherwise` when the key is absent. They throw Error (kInvalidArgument) for what is no such value, and
  // name key, value and range.
  double take_number(const std::string& key, double otherwise, double smallest, double largest);
  std::uint64_t take_integer(const std::string& key, std::uint64_t otherwise, std::uint64_t smallest,
                             std::uint64_t largest);
  bool take_flag(const std::string& key, bool otherwise);  // 0 or 1
  // Returns the index of the value in `choices`, which are separated by '|'; the first one when the key is absent.
  std::size_t take_choice(const std::string& key, std::string_view choices);
  // Throws Error (kInvalidArgument) if something is left, and names it and those that have been asked for.
  void end(std::string_view method) const;

 private:
  std::string take(const std::string& key);  // returns "" when the key is absent

  std::map<std::string, std::string> values_;
  std::string known_;
};

}  // namespace bps::compress
