// libFuzzer: control messages between workers and servers.
#include "fuzz/fuzz.h"
#include "tensor/control_messages.h"

using namespace bps;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto message = tensor::decode(bytes);
  if (!message) return 0;
  fuzz::expect(std::ranges::equal(tensor::encode(*message), bytes));
  fuzz::expect(tensor::decode(tensor::encode(*message)) == message);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  using namespace bps::tensor;
  static const std::vector<Bytes> samples{
      tensor::encode(Attach{1 << 22, true, 2}), tensor::encode(Credits{{{1, 2, 3, 4}, {5, 6, 7, 8}}}),
      tensor::encode(PushFailed{17, ErrorCode::kPeerLost, "what", "hint"}), tensor::encode(WhoIsMissing{1, 2, 3, 4}),
      tensor::encode(Missing{9, {0, 5, 1000000}})};
  return fuzz::mutate_from(samples, data, size, most, seed);
}
