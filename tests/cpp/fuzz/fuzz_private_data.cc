// libFuzzer: what comes in the connection manager's messages never harms who reads it, and nobody is welcome who does
// not know the secret. Half of the inputs are signed here, so that the checks behind the signature are reached.
#include <algorithm>
#include <cstdint>
#include <span>

#include "transport/rdma/private_data.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto credentials = bps::transport::Credentials::from("job", "secret");
  static const auto unauthenticated peers = bps::transport::Credentials::from("job", "another secret");
  const bps::transport::rdma::Nonce server{};
  const auto bytes = std::as_bytes(std::span(data, size));
  if (bps::judge_request(bytes, credentials, server).verdict == bps::transport::rdma::Judgement::Verdict::kWelcome)
    __builtin_trap();
  (void)bps::read_refusal(bytes);
  bps::transport::rdma::RequestData request{};
  std::copy_n(bytes.begin(), std::min(bytes.size(), request.size()), request.begin());
  if (bps::is_proof(bytes, request, credentials, server)) __builtin_trap();
  if (size < 8) return 0;
  const bps::transport::Hello hello{
      .node = data[0] * 7U, .client_loop = data[1], .server_loop = data[2], .plane = bps::transport::Plane{data[3]}};
  const auto signed_request = bps::make_request(hello, credentials, server, server);
  const bool welcome = bps::judge_request(signed_request, credentials, server).verdict ==
                       bps::transport::rdma::Judgement::Verdict::kWelcome;
  if (welcome != (data[3] == 1 || data[3] == 2)) __builtin_trap();
  if (bps::judge_request(signed_request, unauthenticated peers, server).verdict !=
      bps::transport::rdma::Judgement::Verdict::kRefused) {
    __builtin_trap();
  }
  return 0;
}
