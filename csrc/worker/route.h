// SPDX-License-Identifier: Apache-2.0
// How the partitions of an operation reach one server and come back, and what makes their results final.
//
// A worker loop decides both once, when it admits the operation, by a pure function of the facts below. All that
// follows is a switch over the two answers. docs/internals.md has the table.
#pragma once

#include <cstdint>

namespace bps::worker {

enum class Route : std::uint8_t {
  kInPlace,       // the server, or the NIC, reads and writes the caller's memory
  kAnswersAside,  // it reads the caller's memory, and answers go to staging buffers
  kStaged,        // payloads and answers travel through staging buffers
  kEncoded,       // the same, encoded by the tensor's codec
};

// When a result counts, after which the input is not needed any more.
enum class Finality : std::uint8_t {
  kAnswer,  // when the answer has landed
  kCommit,  // when the server has told that all members have their answers
};

// Whether a lost server costs an operation nothing: it is in two phases, see tensor::kTwoPhase.
constexpr bool awaits_commit(Finality finality) {
  return finality == Finality::kCommit;
}

// What the server can do with the caller's memory. From kUnreadable on it is a process of this host that can be kept
// from writing, should it be lost.
enum class Reach : std::uint8_t {
  kNetwork,     // the transport moves the bytes
  kUnfenced,    // a process of this host that cannot be kept from writing
  kUnreadable,  // the kernel forbids copies between the processes
  kReadable,    // it can read the input
  kReachable,   // and write the output
};

struct RouteFacts {
  bool is_encoded = false;     // the tensor has a codec, which this server is sent; such operations have one phase
  bool is_registered = false;  // the transport may use all of the caller's memory directly
  bool is_two_phase = false;
  bool is_continuation = false;  // some members have the result already, in a view that has ended
  bool lands_in_order = false;   // how much of an answer has come over the input is known at any time
  Reach reach = Reach::kNetwork;
};

struct Chosen {
  Route route = Route::kStaged;
  Finality finality = Finality::kAnswer;

  bool operator==(const Chosen&) const = default;
};

// In two phases the input is needed again if the server is lost. An answer that lands in order replaces as much of it
// as has come, and the other members have that part. Any other answer goes to a buffer.
constexpr Chosen choose_route(const RouteFacts& facts) {
  if (facts.is_encoded) return {Route::kEncoded, Finality::kAnswer};  // nothing travels from or to the caller's memory
  const bool aside = facts.is_two_phase && (facts.is_continuation || !facts.lands_in_order);
  const Finality finality = facts.is_two_phase ? Finality::kCommit : Finality::kAnswer;
  if (!facts.is_registered) return {Route::kStaged, finality};
  if (facts.reach == Reach::kNetwork) return {aside ? Route::kAnswersAside : Route::kInPlace, finality};
  // What a server could still write to when it is lost must not be the caller's memory.
  if (aside || facts.reach < Reach::kReachable) {
    const bool is_read = facts.is_two_phase && facts.reach >= Reach::kReadable;
    return {is_read ? Route::kAnswersAside : Route::kStaged, finality};
  }
  return {Route::kInPlace, finality};
}

}  // namespace bps::worker
