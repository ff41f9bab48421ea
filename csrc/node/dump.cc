// SPDX-License-Identifier: Apache-2.0
// Process::dump(). The lists are short and rarely asked for, so text is simply appended.
#include <concepts>
#include <string>
#include <string_view>

#include "core/json.h"
#include "node/loops.h"
#include "node/process.h"

namespace bps::node {
namespace {

constexpr double kPatience_s = 2;
constexpr std::size_t kMostPerLoop = 256;

// An object, field by field.
class Object {
 public:
  Object& add(std::string_view name, const std::string& value) { return add_raw(name, json_string(value)); }
  Object& add(std::string_view name, bool value) { return add_raw(name, value ? "true" : "false"); }
  template <std::integral T>
  Object& add(std::string_view name, T value) {
    return add_raw(name, std::to_string(value));
  }
  Object& add_raw(std::string_view name, std::string_view json) {
    text_ += text_.empty() ? '{' : ',';
    text_ += json_string(name);
    text_ += ':';
    text_ += json;
    return *this;
  }
  std::string end() { return text_ + '}'; }

 private:
  std::string text_;
};

void append(std::string& list, std::string_view item) {
  if (!list.empty()) list += ',';
  list += item;
}

std::string in_brackets(const std::string& list) {
  std::string text(1, '[');
  text += list;
  text += ']';
  return text;
}

std::string to_json(const worker::OpenPartition& one) {
  Object object;
  object.add("operation", one.operation).add("group", one.group).add("tensor", one.tensor);
  object.add("round", one.round).add("partition", one.partition).add("server", one.server);
  return object.add("waits_for", std::string(one.is_sent ? "answer" : "credit")).add("left_ms", one.left_ms).end();
}

std::string name_of(server::OpenRound::Waits waits) {
  using Waits = server::OpenRound::Waits;
  switch (waits) {
    case Waits::kForPushes: return "pushes";
    case Waits::kForNetwork: return "network";
    case Waits::kForAnswers: return "answers";
    case Waits::kForMembers: return "members";
  }
  return "";
}

std::string to_json(const server::OpenRound& one) {
  std::string missing;
  for (const std::uint32_t rank : one.missing) append(missing, std::to_string(rank));
  Object object;
  object.add("group", one.key.group).add("tensor", one.key.tensor).add("partition", one.key.partition);
  object.add("round", one.number).add("for_host", one.key.for_host).add("waits_for", name_of(one.waits));
  return object.add_raw("missing", in_brackets(missing)).end();
}

}  // namespace

std::string Process::dump() const {
  std::string loops;
  std::string operations;
  std::string rounds;
  for (const Loops::OpenState& state : loops_->open_state(kMostPerLoop, Deadline::after(kPatience_s))) {
    append(loops,
           Object().add("name", state.loop).add("answered", state.answered).add("open_rounds", state.rounds).end());
    for (const worker::OpenPartition& one : state.partitions) append(operations, to_json(one));
    for (const server::OpenRound& one : state.listed) append(rounds, to_json(one));
  }
  Object object;
  object.add_raw("loops", in_brackets(loops)).add_raw("operations", in_brackets(operations));
  return object.add_raw("rounds", in_brackets(rounds)).end();
}

}  // namespace bps::node
