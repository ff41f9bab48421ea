// SPDX-License-Identifier: Apache-2.0
// Defines the messages between a user and a pool after the handshake: a request, and a reply to it.
//
//   Reserve -> Reserved   cores and memory, kept while the connection stays open, and two minutes at most
//   Begin   -> Begun      the reserved server starts, and looks for the job
//   End     -> Ended      a job of this user has no server here any more; why, if it ended before
//   List    -> Listed
//
// The pool replies with Refused to a request that it does not do. Each message carries a code of the connection
// (transport/message_mac.h), and is not encrypted, except for the secret of the job (pool/sealed_secret.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "core/bytes.h"
#include "core/codec.h"
#include "core/error.h"

namespace bps::pool {

inline constexpr std::size_t kMostMessage = 1U << 18;
inline constexpr std::size_t kMostText = 256;  // that of a name or a value
inline constexpr std::size_t kMostSecret = 1024;
inline constexpr std::size_t kMostSettings = 128;

struct NamedValue {
  std::string name;
  std::string value;
  static constexpr void fields(auto& io, auto& m) {
    io.bounded(m.name, kMostText);
    io.bounded(m.value, kMostText);
  }
};
using NamedValues = std::vector<NamedValue>;

struct Reserve {
  std::string job;
  std::uint32_t cores = 0;   // 0: what is usual there
  std::uint64_t memory = 0;  // in bytes; 0: what is usual there
  NamedValues settings{};    // those that are known, so that what would be refused is refused at once
  static constexpr void fields(auto& io, auto& m) {
    io.bounded(m.job, kMostText);
    io(m.cores, m.memory, m.settings);
    io.require([&] { return m.settings.size() <= kMostSettings; });
  }
};
struct Begin {
  std::uint64_t lease = 0;
  NamedValues settings;
  Bytes secret;  // encrypted by pool/sealed_secret.h
  static constexpr void fields(auto& io, auto& m) {
    io(m.lease, m.settings);
    io.bounded(m.secret, kMostSecret);
    io.require([&] { return m.settings.size() <= kMostSettings; });
  }
};
struct End {
  std::string job;
  static constexpr void fields(auto& io, auto& m) { io.bounded(m.job, kMostText); }
};
struct List {
  static constexpr void fields(auto&, auto&) {}
};
using Request = std::variant<Reserve, Begin, End, List>;

struct Refused {
  ErrorCode code = ErrorCode::kInternal;
  std::string why;
  std::string hint;
  static constexpr void fields(auto& io, auto& m) {
    io(m.code);
    io.bounded(m.why, 4 * kMostText);
    io.bounded(m.hint, 4 * kMostText);
  }
};
struct Reserved {
  std::uint64_t lease = 0;
  std::uint32_t cores = 0;
  std::uint64_t memory = 0;
  static constexpr void fields(auto& io, auto& m) { io(m.lease, m.cores, m.memory); }
};
struct Begun {
  static constexpr void fields(auto&, auto&) {}
};
struct Ended {
  std::string why;
  static constexpr void fields(auto& io, auto& m) { io.bounded(m.why, 4 * kMostText); }
};
struct Listed {
  std::string json;
  static constexpr void fields(auto& io, auto& m) { io.bounded(m.json, kMostMessage - 1024); }
};
using Reply = std::variant<Refused, Reserved, Begun, Ended, Listed>;

}  // namespace bps::pool
