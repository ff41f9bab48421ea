// libFuzzer: what travels in front of payload: tcp frames, push headers, and pieces of control messages over RDMA.
#include "fuzz/fuzz.h"
#include "tensor/push_header.h"
#include "transport/rdma/wire.h"
#include "transport/tcp/frame.h"

using namespace bps;
using tensor::PushHeader;
using transport::rdma::Fragment;
using transport::tcp::TcpFrame;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  fuzz::same_in_place<TcpFrame>(bytes);
  fuzz::same_in_place<PushHeader>(bytes);
  fuzz::same_in_place<Fragment>(bytes);
  if (const auto header = codec::decode<PushHeader>(bytes)) {
    fuzz::expect(header->length > 0 && header->length % size_of(header->dtype) == 0);
  }
  if (const auto fragment = codec::decode<Fragment>(bytes)) fuzz::expect(fragment->offset <= transport::kMaxMessage);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  static const auto samples = [] {
    PushHeader header{};
    header.version = transport::kProtocolVersion;
    header.flags = tensor::kHasPayload | tensor::kIsPush;
    header.length = 4096;
    return fuzz::as_samples(codec::encode(header), codec::encode(TcpFrame{TcpFrame::kMagic, 1, 2, 3, 4}),
                            codec::encode(Fragment{5000, 4088}));
  }();
  return fuzz::mutate_from(samples, data, size, most, seed);
}
