// SPDX-License-Identifier: Apache-2.0
#include "server/push.h"

#include <cstring>
#include <span>

#include "server/worker_session.h"
#include "tensor/unrounded.h"

namespace bps::server {
namespace {

// Copies the first bytes of the payload. Returns false when there are fewer, or they cannot be read.
bool read_head(const Push& push, std::span<std::byte> into) {
  const std::uint64_t room = push.slot != nullptr ? push.slot->capacity - transport::kMaxHeader : push.span.length;
  if (room < into.size()) return false;
  if (push.slot == nullptr) {
    return push.from.direct()->get({push.span.key, push.span.address, into.size()}, into.data()) == Status::kOk;
  }
  std::memcpy(into.data(), push.slot->payload(), into.size());
  return true;
}

std::uint64_t compressed_bytes(Push& push, CompressedSummer& compressed) {
  compress::Label label;
  if (!read_head(push, std::as_writable_bytes(std::span(label)))) return 0;
  push.compression = compressed.find(label);
  if (push.compression == nullptr) return 0;
  const std::uint64_t length = push.header.length;
  const std::uint64_t elements = length / size_of(push.header.dtype);
  const std::uint64_t bytes = compress::kLabelBytes + push.compression->codec->encoded_size(elements);
  return compress::stands_for_too_much(length, bytes) ? 0 : bytes;
}

std::uint64_t unrounded_bytes(const Push& push) {
  std::byte head[tensor::kUnroundedHeader];
  if (!read_head(push, head)) return 0;
  const std::uint64_t elements = push.header.length / size_of(push.header.dtype);
  const std::uint64_t bytes = tensor::unrounded_bytes(head, elements);
  return bytes <= tensor::most_unrounded_bytes(push.header.dtype, elements) ? bytes : 0;
}

}  // namespace

void measure_encoded(Push& push, CompressedSummer& compressed, std::uint64_t largest_partition) {
  push.payload = 0;
  if (push.header.length > largest_partition || !is_valid(push.header.dtype)) return;
  const bool is_compressed = (push.header.flags & tensor::kCompressed) != 0;
  push.payload = is_compressed ? compressed_bytes(push, compressed) : unrounded_bytes(push);
}

bool is_whole_in_pieces(const Push& push, std::uint64_t due) {
  const std::uint64_t total = transport::kMaxHeader + due;
  return push.slot != nullptr && total <= push.slot->capacity &&
         push.from.is_whole(push.arrived + transport::kMaxHeader, total);
}

void record(Round& round, Arrival& arrival, const Push& push) {
  const tensor::PushHeader& header = push.header;
  const bool pushes = push.pushes();
  const bool pulls = push.pulls();
  arrival.session = &push.session;
  if (pushes || arrival.data == nullptr) arrival.data = &push.from;  // a span is valid where it was posted
  if (pulls || !arrival.awaits_answer()) {
    arrival.immediate = header.immediate;
    arrival.answer_key = header.answer_key;
    arrival.answer_address = header.answer_address;
    arrival.answer_bytes = (header.flags & tensor::kWantsData) != 0 ? AnswerBytes::kPosted : AnswerBytes::kNone;
  }
  if (pulls) arrival.answer.enter(AnswerStage::kAwaited);
  if (!pushes) return;
  arrival.push.enter(pulls ? PushStage::kTaken : PushStage::kUnacknowledged);
  round.count_push();
  round.history.last_rank = push.session.client.worker_rank;
  if (!push.has_payload()) return;
  arrival.payload = Payload::kPlain;
  arrival.slot = push.slot;
  arrival.span = push.span;
  if (header.flags < tensor::kCompressed) [[likely]]
    return;  // also for kUnrounded, the only larger flag
  if ((header.flags & tensor::kUnrounded) != 0) arrival.payload = Payload::kUnrounded;
  if (push.compression == nullptr) return;
  arrival.payload = Payload::kCompressed;
  round.compression = push.compression;
}

}  // namespace bps::server
