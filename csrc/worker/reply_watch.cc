// SPDX-License-Identifier: Apache-2.0
#include "worker/reply_watch.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace bps::worker {
namespace {

// The slowest link that counts as working delivers this many bytes in a second. An answer that a server says it has
// posted may take that much beyond the time for silence.
constexpr double kSlowestLink = 1e6;

const char* name_of(InFlight::Owed what) {
  switch (what) {
    case InFlight::Owed::kAnswer: return "an answer that it has posted did not arrive";
    case InFlight::Owed::kReply: return "it did not reply to an operation that was given up";
    default: return "it did not tell what became of an operation that was given up";
  }
}

ReplyWatch::Overdue overdue(ServerConnection& server, const std::string& what, double seconds) {
  return {&server, what + in_words(seconds) + " by the data network (" + server.reached_by +
                       ") although the connection is open"};
}

}  // namespace

std::string in_words(double seconds) {
  std::string text = std::to_string(seconds);
  return text.substr(0, text.find('.') + 2) + " s";
}

void ReplyWatch::owe(InFlight& entry, InFlight::Owed what) {
  const double silences = silences_until(what, entry.part.for_host());
  const double transfer_s = static_cast<double>(entry.server->outstanding.bytes()) / kSlowestLink;
  entry.owed = what;
  entry.due = Deadline::after(silences * silence_s_ + transfer_s).at();
  is_owed_ = true;
}

std::vector<ReplyWatch::Overdue> ReplyWatch::check(InFlightTable& table, const Connections& connections,
                                                   const std::function<void(std::uint32_t node)>& report) {
  std::vector<Overdue> found;
  const auto now = Clock::now();
  const bool was_stopped = now - std::exchange(last_check_, now) > Silence::kPingAfter;
  if (is_owed_) check_owed(table, now, was_stopped, found);
  for (ServerConnection* server : connections.all()) {
    if (server->is_closed() || server->loss.is_known()) continue;
    if (std::ranges::find(found, server, &Overdue::server) != found.end()) continue;
    const Silence::Verdict verdict = server->silence.judge(now, server->owes_reply(), was_stopped);
    if (verdict == Silence::Verdict::kNothing) continue;
    if (verdict == Silence::Verdict::kLost) {
      const std::chrono::duration<double> silence = server->silence.length(now);
      found.push_back(overdue(*server, "it has not replied for ", silence.count()));
      continue;
    }
    if (verdict == Silence::Verdict::kPingAndReport && report) report(server->node);
    (void)server->send(tensor::Ping{});
  }
  return found;
}

// Finds servers that reply to pings but owe something else for too long: nothing else would ever end that wait.
void ReplyWatch::check_owed(InFlightTable& table, Clock::time_point now, bool was_stopped,
                            std::vector<Overdue>& found) {
  is_owed_ = false;
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    InFlight& entry = table[i];
    if (entry.transfer == nullptr || entry.owed == InFlight::Owed::kNothing) continue;
    is_owed_ = true;
    if (was_stopped) entry.due = std::max(entry.due, now + to_duration(silence_s_));
    ServerConnection& server = *entry.server;
    if (now < entry.due || server.is_closed() || server.loss.is_known() || server.silence.is_expected(now)) continue;
    const double silences = silences_until(entry.owed, entry.part.for_host());
    found.push_back(overdue(server, std::string(name_of(entry.owed)) + " within ", silences * silence_s_));
  }
}

}  // namespace bps::worker
