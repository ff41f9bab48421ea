// SPDX-License-Identifier: Apache-2.0
#include "van/ask_scheduler.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/event_loop.h"
#include "core/interrupt.h"
#include "van/connection.h"
#include "van/find_scheduler.h"

namespace bps::van {
namespace {

constexpr std::uint32_t kCall = 1;
constexpr auto kTurn = std::chrono::milliseconds(50);  // between looks for Ctrl-C

}  // namespace

JobState ask_scheduler(const std::string& host, const std::vector<std::uint16_t>& ports,
                       const transport::Credentials& credentials, bool stacks, const Deadline& deadline) {
  FoundScheduler found = find_scheduler(host, ports, credentials, deadline);
  JobState state;
  std::optional<std::size_t> asked;
  std::optional<std::string> closed;
  EventLoop loop;
  Connection connection(
      loop, std::move(found.socket), transport::MessageKeys::of_client(found.session.key),
      [&](Message&& message) {
        if (auto* first = std::get_if<Asked>(&message)) {
          asked = first->members;
          state.scheduler = std::move(first->state);
        } else if (auto* told = std::get_if<Told>(&message)) {
          state.told.emplace_back(told->node, std::move(told->report));
        }
      },
      [&](const std::string& why) { closed = why; });
  connection.send(Ask{kCall, stacks});
  while (!closed && !deadline.passed() && !(asked && state.told.size() >= *asked)) {
    check_interrupt();
    loop.turn(std::min<Duration>(kTurn, std::chrono::milliseconds(deadline.left_ms())));
  }
  if (asked) return state;
  throw Error(closed ? ErrorCode::kPeerLost : ErrorCode::kTimeout,
              "the scheduler at " + found.where + (closed ? " closed the connection: " + *closed : " does not reply"),
              "check that it runs and is not stopped, and that it is of the same version");
}

}  // namespace bps::van
