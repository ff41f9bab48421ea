// SPDX-License-Identifier: Apache-2.0
// Defines the two error regimes of the library, which are never mixed.
//
// Set-up and bad input throw Error: a code (one Python exception class each), what went wrong, and a hint that is an
// action. The data path returns Status and throws nothing to its callers. Only a defect of this program ends the
// process there: a change of state that has no arrow (core/state.h).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace bps {

enum class ErrorCode : std::uint8_t {
  kInvalidArgument,
  kMismatch,  // ranks, or two uses of one name, disagree
  kNotInitialized,
  kUnknownHandle,
  kPortTaken,
  kAuthentication,  // the secret is wrong, or it is another job
  kVersion,
  kUnreachable,
  kPeerLost,
  kTimeout,
  kTransport,
  kInternal,
  kRoundAborted,  // the view has ended, and the job goes on in the next one
};
constexpr bool is_valid(ErrorCode code) {
  return code <= ErrorCode::kRoundAborted;
}

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& what, std::string hint)
      : std::runtime_error(what), code_(code), hint_(std::move(hint)) {}
  ErrorCode code() const { return code_; }
  const std::string& hint() const { return hint_; }

 private:
  ErrorCode code_;
  std::string hint_;
};

// These are hints for errors after which nothing of the job can be saved.
inline constexpr const char* kDeclareAlike = "declare the tensor with the same dtype and shape everywhere";
inline constexpr const char* kRestartJob = "restart the job from its last checkpoint";
// This is the hint for an operation that has not ended in time.
inline constexpr const char* kRaiseTimeout = "check that every rank of the group calls it, or raise BPS_TIMEOUT";

// Tells how a data-path call has ended.
enum class [[nodiscard]] Status : std::uint8_t {
  kOk,
  kAgain,     // a window is full; retry after the next poll
  kPeerLost,  // the peer is gone, or its memory is
  kProtocol,  // the peer sent what it may not send
  kNoMemory,  // this process has no memory left
  kOverflow,  // a sum does not fit its type
  kCodec,     // a codec of the program has failed
};

// Throws kTransport with errno in words. Where a limit of the system is behind it (core/limits.h), the error names the
// limit and its value, and the hint tells how to raise it. `hint` is for everything else.
[[noreturn]] void throw_errno(const std::string& what, const std::string& hint = "");

}  // namespace bps
