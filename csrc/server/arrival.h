// SPDX-License-Identifier: Apache-2.0
// Describes a contributor in a round: what it has sent, and what it waits for. A contributor is a member of the group,
// or a host, for which its relay speaks.
//
// Its push and its answer are two machines, because a push and a pull may come apart. docs/notes/operations.md draws
// both. Belongs to the server loop's thread.
#pragma once

#include <array>
#include <cstdint>

#include "core/state.h"
#include "server/slot_pool.h"
#include "transport/transport.h"

namespace bps::server {

class WorkerSession;

enum class PushStage : std::uint8_t {
  kMissing,
  kUnacknowledged,  // it came without a pull, and the member waits until its payload lies here
  kGivenUp,         // as kUnacknowledged; the member cancelled it, and waits for the end of its host's contribution
  kTaken,           // it has come, and nobody waits for an acknowledgement
};
constexpr const char* name_of(PushStage) {
  return "a push";
}
constexpr std::array<std::uint16_t, 4> arrows_of(PushStage) {
  return {
      arrows_to(PushStage::kUnacknowledged, PushStage::kTaken),
      arrows_to(PushStage::kGivenUp, PushStage::kTaken),
      arrows_to(PushStage::kGivenUp, PushStage::kTaken),
      arrows_to(),
  };
}

enum class AnswerStage : std::uint8_t {
  kNotAsked,  // the pull has not come
  kAwaited,
  kGivenUp,   // the member has cancelled its pull, and waits for what becomes of its host's contribution
  kLanding,   // in two phases: the answer has been posted
  kLanded,    // in two phases: the member has said that it has the answer, and waits for the commit
  kAnswered,  // with the result, or with word that the round is complete
  kEnded,     // without a result: the member has been told so, has given up, or is gone
};
constexpr const char* name_of(AnswerStage) {
  return "an answer";
}
constexpr std::array<std::uint16_t, 7> arrows_of(AnswerStage) {
  return {
      arrows_to(AnswerStage::kAwaited, AnswerStage::kEnded),
      arrows_to(AnswerStage::kGivenUp, AnswerStage::kLanding, AnswerStage::kAnswered, AnswerStage::kEnded),
      arrows_to(AnswerStage::kGivenUp, AnswerStage::kLanding, AnswerStage::kAnswered, AnswerStage::kEnded),
      arrows_to(AnswerStage::kLanded, AnswerStage::kAnswered, AnswerStage::kEnded),
      arrows_to(AnswerStage::kAnswered, AnswerStage::kEnded),
      arrows_to(),
      arrows_to(),
  };
}

// Says what bytes a push has brought.
enum class Payload : std::uint8_t {
  kNone,
  kPlain,
  kCompressed,  // a label and a code; the answer is a code, too
  kUnrounded,   // see tensor::kUnrounded
};

enum class AnswerBytes : std::uint8_t {
  kNone,     // the member only wants to know that the round is complete
  kPosted,   // they travel, or are copied, when the answer is posted
  kInPlace,  // the pass writes them straight into the worker's memory; SumPlan::write_to() turns kPosted into this
};

struct Arrival {
  WorkerSession* session = nullptr;
  transport::DataEndpoint* data = nullptr;  // the push came here, and the answer goes back the same way
  State<PushStage> push;
  State<AnswerStage> answer;
  Payload payload = Payload::kNone;
  AnswerBytes answer_bytes = AnswerBytes::kNone;
  bool is_asked_for = false;         // the relay was told that its host has left, and has not contributed
  bool is_logged = false;            // in two phases: the member reads the redo log, so its answer needs no commit
  std::uint32_t push_immediate = 0;  // of the acknowledgement of a push without a pull
  std::uint32_t immediate = 0;       // of the answer: the pull's, once that has come, else the push's
  std::uint64_t answer_key = 0;      // of the memory that the answer goes to, by the same rule
  std::uint64_t answer_address = 0;
  Slot* slot = nullptr;        // where the payload lies; null: it does not lie in a slot
  transport::RemoteSpan span;  // where it lies in the worker's memory (length > 0)

  bool has_payload() const { return payload != Payload::kNone; }
  bool is_compressed() const { return payload == Payload::kCompressed; }
  bool has_pushed() const { return !push.is(PushStage::kMissing); }
  bool wants_data() const { return answer_bytes != AnswerBytes::kNone; }
  bool awaits_acknowledgement() const { return push.is_between(PushStage::kUnacknowledged, PushStage::kGivenUp); }
  bool awaits_answer() const { return answer.is_between(AnswerStage::kAwaited, AnswerStage::kLanded); }
  // Returns true when the member has the result, or knows that there will be none.
  bool is_done() const { return answer.is_between(AnswerStage::kAnswered, AnswerStage::kEnded); }

  // Notes that nobody waits for the acknowledgement any more.
  void end_push() {
    if (awaits_acknowledgement()) push.enter(PushStage::kTaken);
  }
};

}  // namespace bps::server
