// SPDX-License-Identifier: Apache-2.0
// Connects a user to a pool.
//
// It belongs to one thread. It throws the Error that the pool gives for a refusal, and kUnreachable, kAuthentication or
// kVersion without a connection. Waits end at `timeout_s`, and at an interrupt (core/interrupt.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/event_loop.h"
#include "pool/key_file.h"
#include "pool/messages.h"
#include "transport/message_stream.h"

namespace bps::pool {

class Client {
 public:
  Client(const std::string& host, std::uint16_t port, const UserKey& user, double timeout_s);

  Reserved reserve(const Reserve& request);
  void begin(std::uint64_t lease, const NamedValues& settings, const std::string& secret);
  // Ends the server of this job. Returns why it had ended already, or "" if it had not.
  std::string end(const std::string& job);
  std::string list();
  // Returns the address of this host from which the pool is reached, and at which the pool reaches this host.
  const std::string& address() const { return address_; }

 private:
  template <typename Expected>
  Expected ask(const Request& request);

  const std::string where_;
  const double timeout_s_;
  EventLoop loop_;
  Digest key_{};
  std::string address_;
  std::optional<Reply> reply_;
  std::optional<std::string> closed_;
  std::unique_ptr<transport::MessageStream> stream_;  // is the last member: it uses the loop until its end
};

}  // namespace bps::pool
