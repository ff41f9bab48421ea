// SPDX-License-Identifier: Apache-2.0
// libFuzzer: control messages between workers and servers.
#include "fuzz/fuzz.h"
#include "tensor/control_messages.h"

using namespace bps;

constexpr std::uint32_t kEpoch = 1;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto message = tensor::decode(bytes, kEpoch);
  if (!message) return 0;
  fuzz::expect(std::ranges::equal(tensor::encode(*message, kEpoch), bytes));
  fuzz::expect(tensor::decode(tensor::encode(*message, kEpoch), kEpoch) == message);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  using namespace bps::tensor;
  static const std::vector<Bytes> samples = [] {
    const std::vector<ControlMessage> messages{
        Attach{1 << 22, true, 2},
        Credits{{{SlotNumber(1), 2, 3, 4}, {SlotNumber(5), 6, 7, 8}}},
        PushFailed{17, ErrorCode::kPeerLost, "what", "hint"},
        Cancel{1, 2, 3, ErrorCode::kTimeout, "rank 0 gave up", "hint", {{7, 8}, {9, 10}}},
        Cancelled{{1, 2}, {3}, {0, 5, 1000000}},
        Ping{5},
        Echo{5},
        Received{3, {7, 8}},
        PathLost{3, {1, 2}},
        PathBroken{3},
        AnswerKeys{3, 4, {{1, 2}}},
        Landed{{7, 8}},
        Committed{{9}}};
    std::vector<Bytes> encoded;
    for (const ControlMessage& message : messages) encoded.push_back(encode(message, kEpoch));
    return encoded;
  }();
  return fuzz::mutate_from(samples, data, size, most, seed);
}
