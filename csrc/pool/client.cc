// SPDX-License-Identifier: Apache-2.0
#include "pool/client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/clock.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "pool/sealed_secret.h"
#include "transport/handshake.h"
#include "transport/listener.h"

namespace bps::pool {
namespace {

constexpr auto kTurn = std::chrono::milliseconds(50);  // passes between looks for Ctrl-C

std::string words_for_pool(const std::string& host, std::uint16_t port) {
  const std::string shown = host.find(':') == std::string::npos ? host : "[" + host + "]";  // IPv6 texts have colons
  return "the pool at " + shown + ":" + std::to_string(port);
}

// Returns this end's address. An IPv4 address is shown as such, even by a socket for IPv6 as well.
std::string own_address(int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &size) != 0)
    throw_errno("cannot ask for an address");
  if (storage.ss_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(storage).sin_addr, text.data(), text.size());
    return text.data();
  }
  const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr;
  const bool is_mapped = IN6_IS_ADDR_V4MAPPED(&address);
  ::inet_ntop(is_mapped ? AF_INET : AF_INET6, is_mapped ? &address.s6_addr[12] : &address.s6_addr[0], text.data(),
              text.size());
  return text.data();
}

}  // namespace

Client::Client(const std::string& host, std::uint16_t port, const UserKey& user, double timeout_s)
    : where_(words_for_pool(host, port)), timeout_s_(timeout_s) {
  const Deadline deadline = Deadline::after(timeout_s);
  try {
    transport::GreetedSocket greeted =
        transport::connect_and_shake([&] { return transport::connect_tcp(host, port, deadline); },
                                     {.plane = transport::Plane::kVan}, credentials_of(user), deadline, where_);
    key_ = greeted.session.key;
    address_ = own_address(greeted.socket.get());
    stream_ = std::make_unique<transport::MessageStream>(std::move(greeted.socket),
                                                         transport::MessageKeys::of_client(key_), kMostMessage);
  } catch (const transport::HandshakeError& error) {
    switch (error.refusal()) {
      case transport::Refusal::kSecret:
      case transport::Refusal::kJob:
        throw Error(ErrorCode::kAuthentication, where_ + " does not know the user " + user.user + " with this key",
                    "ask its operator for a line with a key (bps-server --pool-key " + user.user +
                        "), and set BPS_POOL_KEY_FILE to a file with it");
      default: throw;
    }
  }
  stream_->start(loop_, {.on_message =
                             [this](std::span<const std::byte> message) {
                               reply_ = codec::decode<Reply>(message);
                               if (!reply_) closed_ = "its reply cannot be read";
                             },
                         .on_closed = [this](const std::string& why) { closed_ = why; }});
}

template <typename Expected>
Expected Client::ask(const Request& request) {
  const Deadline deadline = Deadline::after(timeout_s_);
  reply_.reset();
  (void)stream_->send(codec::encode(request));  // the loop notices when the stream is closed
  while (!reply_ && !closed_ && !deadline.passed()) {
    check_interrupt();
    loop_.turn(std::min<Duration>(kTurn, std::chrono::milliseconds(deadline.left_ms())));
  }
  if (!reply_) {
    throw Error(closed_ ? ErrorCode::kUnreachable : ErrorCode::kTimeout,
                where_ + (closed_ ? " ended the connection: " + *closed_ : " does not reply"),
                "see its log; it allows each user a few connections at a time");
  }
  if (const auto* refused = std::get_if<Refused>(&*reply_)) {
    throw Error(refused->code, where_ + ": " + refused->why, refused->hint);
  }
  if (auto* expected = std::get_if<Expected>(&*reply_)) return std::move(*expected);
  throw Error(ErrorCode::kUnreachable, where_ + " replies to another question", "install the same version everywhere");
}

Reserved Client::reserve(const Reserve& request) {
  return ask<Reserved>(request);
}

void Client::begin(std::uint64_t lease, const NamedValues& settings, const std::string& secret) {
  if (secret.size() > kMostSecret) {
    throw Error(ErrorCode::kInvalidArgument,
                "the secret of the job has more than " + std::to_string(kMostSecret) + " characters", "shorten it");
  }
  ask<Begun>(Begin{lease, settings, seal_secret(key_, lease, as_bytes(secret))});
}

std::string Client::end(const std::string& job) {
  return ask<Ended>(End{job}).why;
}

std::string Client::list() {
  return ask<Listed>(List{}).json;
}

}  // namespace bps::pool
