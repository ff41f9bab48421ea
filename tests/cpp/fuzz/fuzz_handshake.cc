// SPDX-License-Identifier: Apache-2.0
// libFuzzer: the handshake of sockets, its messages and both of its sides. A peer that does not know the secret is
// never accepted, whatever it sends.
#include <sys/socket.h>

#include "concatenate.h"
#include "fuzz/fuzz.h"
#include "transport/handshake_messages.h"

using namespace bps;
using namespace bps::transport;

namespace {

const Credentials kJob = Credentials::from("job", "secret");

// A socket on which a peer has sent `bytes`, and nothing more will come.
Fd receiving(std::span<const std::byte> bytes, Fd& peer) {
  int fds[2];
  fuzz::expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  peer = Fd(fds[0]);
  fuzz::expect(::send(fds[0], bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  ::shutdown(fds[0], SHUT_WR);
  return Fd(fds[1]);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  fuzz::round_trip<Preamble>(bytes);
  fuzz::round_trip<ClientHello>(bytes);
  fuzz::round_trip<Challenge>(bytes);
  fuzz::round_trip<Proof>(bytes);
  if (size == 0 || size > 4096) return 0;
  Fd peer;
  ServerHandshake server(receiving(bytes, peer), kJob);
  for (int i = 0; i < 8; ++i) fuzz::expect(server.advance() != ServerHandshake::State::kAccepted);
  bool refused = false;
  try {
    client_handshake(receiving(bytes, peer).get(), {}, kJob, Deadline::after(1), "the server");
  } catch (const HandshakeError&) {
    refused = true;
  }
  fuzz::expect(refused);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  static const auto hello = codec::encode(
      ClientHello{.preamble = Preamble(HandshakeKind::kHello, Plane::kControl), .hello = {}, .job = kJob.job});
  static const auto samples =
      fuzz::as_samples(hello, concatenate({hello, codec::encode(Proof{})}),
                       codec::encode(Challenge{.preamble = Preamble(HandshakeKind::kChallenge)}),
                       codec::encode(Preamble(HandshakeKind::kRefusal, Refusal::kJob)),
                       codec::encode(Preamble(HandshakeKind::kWelcome)));
  return fuzz::mutate_from(samples, data, size, most, seed);
}
