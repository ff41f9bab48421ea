// libFuzzer: bytes from anybody never harm the van's decoder, and what it accepts is what the encoder sends.
#include <algorithm>
#include <cstdint>
#include <span>

#include "van/message_samples.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto message = bps::van::decode(bytes);
  if (message && !std::ranges::equal(bps::van::encode(*message), bytes)) __builtin_trap();
  return 0;
}

// Now and then a mutation starts from a message that the decoder knows: its inner checks are reached at once.
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  static const auto samples = bps::test::message_samples();
  if (seed % 64 == 0) {
    const auto bytes = bps::van::encode(samples[seed / 64 % samples.size()]);
    if (bytes.size() <= most) {
      for (size = 0; size < bytes.size(); ++size) data[size] = static_cast<std::uint8_t>(bytes[size]);
    }
  }
  return LLVMFuzzerMutate(data, size, most);
}
