// SPDX-License-Identifier: Apache-2.0
// What happened in a simulation: a hash of all of it, and the text where somebody wants to read it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "event_queue.h"
#include "random.h"

namespace bps::sim {

// Something that must never happen.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Trace {
 public:
  Trace(const EventQueue& events, bool prints) : events_(events), prints_(prints) {}

  // Called for each note, if anybody listens.
  std::function<void(std::string_view what, std::uint64_t a, std::uint64_t b, std::uint64_t c)> when_noted;

  void note(std::string_view what, std::uint64_t a = 0, std::uint64_t b = 0, std::uint64_t c = 0) {
    if (when_noted) when_noted(what, a, b, c);
    const auto now = static_cast<std::uint64_t>(events_.now().time_since_epoch().count());
    for (const char letter : what) hash_ = mix(hash_ ^ static_cast<unsigned char>(letter));
    for (const std::uint64_t number : {now, a, b, c}) hash_ = mix(hash_ ^ number);
    ++length_;
    if (!prints_) return;
    std::printf("%12.3f ms  %-12.*s %llu %llu %llu\n", static_cast<double>(now) / 1e6 - 3.6e6,
                static_cast<int>(what.size()), what.data(), static_cast<unsigned long long>(a),
                static_cast<unsigned long long>(b), static_cast<unsigned long long>(c));
  }
  void say(std::string_view member, std::uint64_t number, const std::string& text) {
    note(member, number, text.size());
    if (prints_) std::printf("                 %s\n", text.c_str());
  }
  std::uint64_t hash() const { return hash_; }
  std::uint64_t length() const { return length_; }

 private:
  const EventQueue& events_;
  const bool prints_;
  std::uint64_t hash_ = 0;
  std::uint64_t length_ = 0;
};

}  // namespace bps::sim
