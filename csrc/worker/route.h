// SPDX-License-Identifier: Apache-2.0
// A route says how partitions reach a server and come back, and a finality what makes their results final.
//
// A worker loop decides both when it admits the operation, by a pure function of the facts below. All that follows is a
// switch over the two answers. docs/notes/operations.md has the table.
#pragma once

#include <cstdint>

namespace bps::worker {

enum class Route : std::uint8_t {
  kInPlace,        // the server, or the NIC, reads and writes the caller's memory
  kAnswersAside,   // it reads the caller's memory, and answers go to staging buffers
  kStagedIfCheap,  // it could use the caller's memory; while a staging buffer is free, two copies take less time
  kStaged,         // payloads and answers travel through staging buffers
  kEncoded,        // as kStaged, and encoded by the tensor's codec
  kDeviceDirect,   // as kInPlace, in the memory of a GPU, once that has reached the caller's call
  kDevice,         // as kStaged, and copied by the engines of a GPU
  kDeviceEncoded,  // as kDevice, and encoded by the tensor's codec in staging buffers
};

// Returns true where the engines of a GPU copy.
constexpr bool is_copied_by_device(Route route) {
  return route >= Route::kDevice;
}
// Returns true where no staging buffer is ever needed.
constexpr bool is_in_place(Route route) {
  return route == Route::kInPlace || route == Route::kDeviceDirect;
}
constexpr bool is_encoded(Route route) {
  return route == Route::kEncoded || route == Route::kDeviceEncoded;
}

// Says when a result counts. After that the input is not needed any more.
enum class Finality : std::uint8_t {
  kAnswer,  // when the answer has landed
  kLogged,  // as kAnswer; the server keeps a redo log, from which a result is completed if the server is lost
  kCommit,  // when the server has told that all members have their answers
};

// Returns true where the server says when results count. All but kAnswer are for operations in two phases
// (tensor::kTwoPhase), which a lost server costs nothing.
constexpr bool awaits_commit(Finality finality) {
  return finality == Finality::kCommit;
}

// Tells what the server can do with the caller's memory. From kUnreadable on the server is a process of this host that
// can be kept from writing, should it be lost.
enum class Reach : std::uint8_t {
  kNetwork,     // the transport moves the bytes
  kUnfenced,    // a process of this host that cannot be kept from writing
  kUnreadable,  // the kernel forbids copies between the processes
  kReadable,    // only the input
  kCopies,      // input and output, by two system calls for a partition
  kMapped,      // the server has mapped both
};

struct RouteFacts {
  bool is_encoded = false;     // the tensor is encoded for this server; such operations have one phase
  bool is_on_device = false;   // the caller's memory is a GPU's
  bool is_registered = false;  // the transport may use all of the caller's memory directly
  bool is_small = false;       // copies of the whole operation stay in the cache
  bool survives_servers = false;
  bool is_continuation = false;  // some members have the result already, in a view that has ended
  bool lands_in_order = false;   // how much of an answer has come over the input is known at any time
  bool is_logged = false;  // this server keeps a redo log that this rank reads, and the tensor's ranks share a host
  Reach reach = Reach::kNetwork;
};

struct Chosen {
  Route route = Route::kStaged;
  Finality finality = Finality::kAnswer;

  bool operator==(const Chosen&) const = default;
};

// The input of an operation in two phases is needed again if the server is lost. An answer that lands in order replaces
// as much of it as has come, which other members have, and so does one that the redo log tells of. Any other answer
// goes to a buffer. One for a GPU's memory always does, and the GPU copies it to there once it counts.
constexpr Chosen choose_route(const RouteFacts& facts) {
  if (facts.is_encoded) {  // nothing travels from or to the caller's memory
    return {facts.is_on_device ? Route::kDeviceEncoded : Route::kEncoded, Finality::kAnswer};
  }
  const bool is_fenced = facts.reach >= Reach::kUnreadable;
  const bool is_logged = facts.survives_servers && is_fenced && facts.is_logged;
  const bool aside = facts.survives_servers && (facts.is_continuation || (!is_logged && !facts.lands_in_order));
  const Finality finality = !facts.survives_servers ? Finality::kAnswer
                            : is_logged             ? Finality::kLogged
                                                    : Finality::kCommit;
  if (facts.is_on_device) {
    const bool is_direct = facts.is_registered && facts.reach == Reach::kNetwork && !facts.survives_servers;
    return {is_direct ? Route::kDeviceDirect : Route::kDevice, finality};
  }
  if (!facts.is_registered) return {Route::kStaged, finality};
  if (facts.reach == Reach::kNetwork) return {aside ? Route::kAnswersAside : Route::kInPlace, finality};
  // A server that could still write when it is lost must not reach the caller's memory.
  if (aside || facts.reach < Reach::kCopies) {
    const bool is_read = facts.survives_servers && facts.reach >= Reach::kReadable;
    return {is_read ? Route::kAnswersAside : Route::kStaged, finality};
  }
  if (facts.reach == Reach::kMapped) return {Route::kInPlace, finality};
  return {facts.is_small ? Route::kStagedIfCheap : Route::kInPlace, finality};
}

}  // namespace bps::worker
