// SPDX-License-Identifier: Apache-2.0
#include "worker/round_numbers.h"

#include <limits>

#include "core/error.h"

namespace bps::worker {
namespace {

// Other threads may have begun later rounds meanwhile.
void go_beyond(std::atomic<std::uint32_t>& next, std::uint32_t round) {
  std::uint32_t now = next.load();
  while (static_cast<std::int32_t>(round + 1 - now) > 0 && !next.compare_exchange_weak(now, round + 1)) {
  }
}

}  // namespace

std::uint32_t take_round(Tensor& tensor, const Request& request) {
  if (tensor::is_feedback(request.kind) && !tensor.compressor) {
    throw Error(ErrorCode::kInvalidArgument, "'" + tensor.name + "' is not compressed: nothing of it is fed back",
                "declare it with a compression");
  }
  const bool feeds = tensor::is_feedback(request.kind);  // of push_pull
  if (tensor.compressor && (feeds || tensor.compressor->applies(request.kind, request.op)) &&
      !tensor.compressor->bind(feeds ? tensor::OperationKind::kPushPull : request.kind)) {
    throw Error(ErrorCode::kInvalidArgument,
                "'" + tensor.name + "' is compressed, and was used with another kind of operation before",
                "use names of their own for push_pull and reduce_scatter");
  }
  const bool split = request.kind == tensor::OperationKind::kSplit;
  if (split && request.pulls) return tensor.next_pull.fetch_add(1);
  const std::uint32_t round = tensor.next_round.fetch_add(1);
  if (!split) go_beyond(tensor.next_pull, round);
  return round;
}

void leave_round(Tensor& tensor, std::uint32_t round) {
  go_beyond(tensor.next_round, round);
  go_beyond(tensor.next_pull, round);
}

void count_tries(Tensor& tensor, Request& request, std::uint32_t round) {
  if (!request.again) tensor.latest.store(round);
  const std::uint32_t tries = round - tensor.latest.load();
  if (tries > std::numeric_limits<std::uint16_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, "'" + tensor.name + "' was sent too often without success",
                "call store() again, on every rank");
  }
  request.addition.tries = static_cast<std::uint16_t>(tries);
}

}  // namespace bps::worker
