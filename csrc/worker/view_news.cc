// SPDX-License-Identifier: Apache-2.0
#include "worker/view_news.h"

#include "tensor/operation_names.h"

namespace bps::worker {

void ViewNews::leave(const Error& why) {
  gone_.end(why);
  planner_.stop_shifts();
}

void ViewNews::follow(WorkerLoop& loop) {
  loop.events.when_checked = [rounds = late_rounds_, &loop](const Operation* first) { rounds->note(&loop, first); };
}

// The van's thread calls this, and perhaps the thread that goes into the next view. The second one waits for the first,
// or the loops could hear that the process leaves before they hear why.
void ViewNews::end_view(const Error& why) {
  std::call_once(end_of_view_, [&] {
    gone_.end(why);  // if this process does not leave already: then what is under way ends by that
    view_end_->note(why.what());
    planner_.stop_shifts();
    loops_.tell([why](WorkerLoop& loop) { loop.end_view(why); });
  });
}

void ViewNews::lose_node(std::uint32_t node, const std::string& why) {
  const van::Node* gone = van_.membership().by_id(node);
  if (!gone_.note_lost(node, why)) return;
  if (node == 0) planner_.stop_shifts();  // the scheduler knows of other losses: it calls the shift off
  loops_.tell([this, gone, node, why](WorkerLoop& loop) {
    const auto concerns = [&](const Operation& operation) {
      return gone == nullptr || gone_.concerns(*gone, *operation.tensor->group);
    };
    loop.abort_operations(concerns, ErrorCode::kPeerLost, why, kRestartJob);
    loop.lose_server(node, why);
  });
}

void ViewNews::on_reachable(std::uint32_t node) const {
  loops_.tell([node](WorkerLoop& loop) { loop.on_reachable(node); });
}

void ViewNews::fail_tensor(std::uint32_t id, const std::string& why) {
  declarations_.fail(id, why);
  loops_.tell([id, why](WorkerLoop& loop) {
    loop.abort_operations([&](const Operation& operation) { return operation.tensor->id == id; }, ErrorCode::kMismatch,
                          why, kDeclareAlike);
  });
}

void ViewNews::fail_round(const van::RoundFailed& failed) const {
  loops_.tell([failed](WorkerLoop& loop) {
    const auto concerns = [&](const Operation& operation) {
      const Tensor& tensor = *operation.tensor;
      return tensor.id == failed.tensor && tensor.group->id == failed.group && operation.round == failed.round;
    };
    loop.abort_operations(concerns, ErrorCode::kMismatch, failed.text, tensor::kCallAlike);
  });
}

std::vector<van::TensorRound> ViewNews::begin_shift() {
  planner_.begin_shift();  // before the tensors are looked at: a round that begins meanwhile waits
  return planner_.next_rounds(declarations_.all());
}

}  // namespace bps::worker
