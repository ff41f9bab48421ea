// SPDX-License-Identifier: Apache-2.0
#include "worker/round_numbers.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace bps::worker {
namespace {

// Returns the next round of a counter that has not failed before.
std::uint32_t take(Tensor& tensor, std::atomic<std::uint32_t>& next) {
  std::uint32_t round = next.fetch_add(1);
  if (!tensor.has_void.load()) [[likely]]
    return round;
  const std::lock_guard lock(tensor.void_mutex);
  while (std::ranges::find(tensor.void_rounds, round) != tensor.void_rounds.end()) round = next.fetch_add(1);
  return round;
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
  if (split && request.pulls) return take(tensor, tensor.next_pull);
  const std::uint32_t round = take(tensor, tensor.next_round);
  if (!split) {  // other threads may have begun later ones meanwhile
    std::uint32_t pull = tensor.next_pull.load();
    while (static_cast<std::int32_t>(round + 1 - pull) > 0 &&
           !tensor.next_pull.compare_exchange_weak(pull, round + 1)) {
    }
  }
  return round;
}

void void_round(Tensor& tensor, std::uint32_t round) {
  const std::lock_guard lock(tensor.void_mutex);
  const auto is_taken = [&](std::uint32_t one) {
    const auto is_before = [&](std::uint32_t next) { return static_cast<std::int32_t>(next - one) > 0; };
    return is_before(tensor.next_round.load()) && is_before(tensor.next_pull.load());
  };
  std::erase_if(tensor.void_rounds, is_taken);
  if (!is_taken(round)) tensor.void_rounds.push_back(round);
  tensor.has_void.store(!tensor.void_rounds.empty());
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
