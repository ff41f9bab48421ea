// libFuzzer: messages between nodes and the scheduler.
#include "fuzz/fuzz.h"
#include "van/message_samples.h"

using namespace bps;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto message = van::decode(bytes);
  if (!message) return 0;
  fuzz::expect(std::ranges::equal(van::encode(*message), bytes));
  fuzz::expect(van::decode(van::encode(*message)) == message);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  static const auto samples = [] {
    std::vector<Bytes> all;
    for (const van::Message& message : van::test::message_samples()) all.push_back(van::encode(message));
    return all;
  }();
  return fuzz::mutate_from(samples, data, size, most, seed);
}
