// SPDX-License-Identifier: Apache-2.0
// Keeps the calls to the scheduler that wait for their answers.
//
// Threading: callers wait on their own threads, and can be interrupted; the van's thread brings the answers.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/clock.h"
#include "van/messages.h"

namespace bps::van {

// Describes a call of this process that the scheduler has not answered.
struct WaitingCall {
  std::string what;
  std::int64_t since_ms = 0;
};

class PendingCalls {
 public:
  // Is one call. It lives on the caller's stack, and removes itself when destroyed.
  class Call {
   public:
    // `what` names the call for people: "the barrier of group 0".
    Call(PendingCalls& calls, std::string what);  // with the next free number; throws kNotInitialized after close()
    Call(PendingCalls& calls, std::string what, std::uint32_t number);  // with this number; also after close()
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    std::uint32_t number() const { return number_; }
    const std::string& what() const { return what_; }
    // Notes what has been asked, for requests().
    void note(const Message& request);
    // Returns the answer, or nothing when the deadline passed first. Throws the error of break_all() if that comes or
    // came first, and the error that a Failed or Refused carries.
    std::optional<Message> wait(const Deadline& deadline);

   private:
    friend class PendingCalls;
    PendingCalls& calls_;
    const std::string what_;
    const Clock::time_point since_ = Clock::now();
    std::uint32_t number_;
    std::condition_variable answered_;
    std::optional<Message> request_;
    std::optional<Message> answer_;
  };

  void answer(std::uint32_t number, Message&& message);
  // Fails all calls with this error, and further ones until reset(), because no answers will come.
  void break_all(const Error& why);
  // Fails the calls that wait, and further ones, with kNotInitialized, because this process leaves the job.
  void close();
  // Forgets the error of break_all(), for a new connection.
  void reset();
  std::vector<WaitingCall> list();
  // Returns the requests of the calls without an answer, in the order of their numbers.
  std::vector<Message> requests();
  // Returns the request of the call with this number, if it still waits.
  std::optional<Message> request(std::uint32_t number);

 private:
  std::mutex mutex_;
  std::unordered_map<std::uint32_t, Call*> waiting_;
  std::uint32_t last_number_ = 0;
  std::optional<Error> broken_;
  bool closed_ = false;
};

}  // namespace bps::van
