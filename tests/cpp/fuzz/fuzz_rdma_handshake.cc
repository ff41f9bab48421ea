// libFuzzer: the handshake inside the connection manager's messages, and the addresses of RDMA listeners. A peer that
// does not know the secret is never accepted. Part of each input is signed here, so that what follows the signature is
// reached as well.
#include "fuzz/fuzz.h"
#include "transport/rdma/listener_address.h"
#include "transport/rdma/private_data.h"

using namespace bps;
using namespace bps::transport;
using namespace bps::transport::rdma;
using Verdict = Judgement::Verdict;

namespace {

const Credentials kJob = Credentials::from("job", "secret");
const Credentials kOther = Credentials::from("job", "another secret");
const transport::Nonce kServer{};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  fuzz::round_trip<Request>(bytes);
  fuzz::round_trip<Reply>(bytes);
  fuzz::round_trip<ListenerAddress>(bytes);
  if (const auto address = codec::decode<ListenerAddress>(bytes)) fuzz::expect(!address->describe().empty());
  fuzz::expect(judge_request(bytes, kJob, kServer).verdict != Verdict::kAccepted);
  if (const auto refusal = read_refusal(bytes)) fuzz::expect(refusal->reason <= Refusal::kSilent);
  RequestData request{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), request.size()), request.begin());
  fuzz::expect(!is_proof(bytes, request, kJob, kServer));
  if (size < 8) return 0;
  const Hello hello{.node = data[0] * 7U, .client_loop = data[1], .server_loop = data[2], .plane = Plane{data[3]}};
  const auto signed_request = make_request(hello, kJob, kServer, kServer);
  const bool valid = hello.plane == Plane::kControl || hello.plane == Plane::kData;
  fuzz::expect((judge_request(signed_request, kJob, kServer).verdict == Verdict::kAccepted) == valid);
  fuzz::expect(judge_request(signed_request, kOther, kServer).verdict != Verdict::kAccepted);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  static const auto request = make_request({1, 2, 3, Plane::kData}, kOther, kServer, kServer);
  static const auto samples =
      fuzz::as_samples(request, make_reply(request, kOther, kServer), make_refusal(Refusal::kJob),
                       codec::encode(ListenerAddress{kServer, {{"10.0.0.1", 4711}, {"host", 80}}}));
  return fuzz::mutate_from(samples, data, size, most, seed);
}
