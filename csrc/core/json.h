// SPDX-License-Identifier: Apache-2.0
// Writes JSON. These are pure functions that throw nothing. They take bytes from 0x80 on to be UTF-8.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <utility>

namespace bps {

std::string json_string(std::string_view text);

// Writes an object, field by field.
class JsonObject {
 public:
  JsonObject& add(std::string_view name, const std::string& value) { return add_raw(name, json_string(value)); }
  JsonObject& add(std::string_view name, bool value) { return add_raw(name, value ? "true" : "false"); }
  template <typename T>
    requires std::integral<T> || std::floating_point<T>
  JsonObject& add(std::string_view name, T value) {
    return add_raw(name, std::to_string(value));
  }
  // Adds a value that is JSON already.
  JsonObject& add_raw(std::string_view name, std::string_view json) {
    text_ += text_.size() == 1 ? "" : ",";
    text_ += json_string(name);
    text_ += ':';
    text_ += json;
    return *this;
  }
  std::string end() { return std::move(text_) + '}'; }

 private:
  std::string text_ = "{";
};

// Writes a list, item by item.
class JsonList {
 public:
  JsonList& add(const std::string& value) { return add_raw(json_string(value)); }
  template <std::integral T>
  JsonList& add(T value) {
    return add_raw(std::to_string(value));
  }
  JsonList& add_raw(std::string_view json) {
    text_ += text_.size() == 1 ? "" : ",";
    text_ += json;
    return *this;
  }
  std::string end() { return std::move(text_) + ']'; }

 private:
  std::string text_ = "[";
};

}  // namespace bps
