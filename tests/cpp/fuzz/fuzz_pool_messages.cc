// SPDX-License-Identifier: Apache-2.0
// libFuzzer: what a user and a pool of servers say to each other, and what a pool reads back from its servers.
#include <string>

#include "concatenate.h"
#include "fuzz/fuzz.h"
#include "pool/messages.h"
#include "pool/server_process.h"

using namespace bps;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  fuzz::round_trip<pool::Request>(bytes);
  fuzz::round_trip<pool::Reply>(bytes);
  if (const auto read = pool::Assignment::from_text(std::string(as_text(bytes)))) {
    const auto again = pool::Assignment::from_text(read->to_text());
    fuzz::expect(again && again->to_text() == read->to_text());
  }
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  static const auto samples = fuzz::as_samples(
      codec::encode(pool::Request{pool::Reserve{"job", 2, 1U << 30}}),
      codec::encode(pool::Request{pool::Begin{1, {{"BPS_JOB_ID", "job"}}, Bytes(32)}}),
      codec::encode(pool::Request{pool::End{"job"}}), codec::encode(pool::Reply{pool::Reserved{1, 2, 3}}),
      codec::encode(pool::Reply{pool::Refused{ErrorCode::kTransport, "why", "hint"}}),
      concatenate({as_bytes("9030 0 2 1073741824 alice 0,1 job")}));
  return fuzz::mutate_from(samples, data, size, most, seed);
}
