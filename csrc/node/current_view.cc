// SPDX-License-Identifier: Apache-2.0
#include "node/current_view.h"

#include <utility>

#include "compress/codec_call.h"
#include "node/view.h"
#include "van/van.h"
#include "worker/worker.h"

namespace bps::node {
namespace {

// What a codec may wait for is refused after this part of the heartbeat's time-out: the loop that runs the codec can
// then go on before this process counts as lost.
constexpr double kRefusesCalls = 0.75;

// Bounds how many connections all members together tell the scheduler of with each heartbeat. That of a large job is
// told less often.
constexpr std::size_t kMostTold = 50'000;
std::size_t beats_per_link_use(const van::Membership& members) {
  return members.nodes.size() * members.servers / kMostTold + 1;
}

}  // namespace

CurrentView::CurrentView(const ProcessOptions& options, const transport::Credentials& credentials)
    : options_(options), credentials_(credentials) {}
CurrentView::~CurrentView() = default;

worker::Worker* CurrentView::worker() const {
  return view_ ? view_->worker() : nullptr;
}

void CurrentView::set_van(van::Van* van) {
  const std::lock_guard lock(mutex_);
  van_ = van;
}

void CurrentView::begin(std::unique_ptr<View> view) {
  const std::lock_guard lock(mutex_);
  view_ = std::move(view);
}

void CurrentView::end() {
  if (view_) view_->stop();
  std::unique_ptr<View> ended;  // is destroyed after the lock is gone
  const std::lock_guard lock(mutex_);
  ended.swap(view_);
}

bool CurrentView::has_ended() const {
  const std::lock_guard lock(mutex_);
  return (van_ != nullptr && van_->end().view_ended()) ||
         (worker() != nullptr && worker()->news().view_end().is_known());
}

void CurrentView::give_up() {
  const std::lock_guard lock(mutex_);
  if (van_ != nullptr) van_->give_up();
}

void CurrentView::with_view(auto tell) {
  const std::lock_guard lock(mutex_);
  if (view_) tell(*view_);
}

void CurrentView::with_worker(auto tell) {
  with_view([&](View& view) {
    if (view.worker() != nullptr) tell(*view.worker());
  });
}

van::VanEvents CurrentView::events() {
  return {
      .on_view =
          [this](const transport::ViewId& id) {
            incarnation_ = id.incarnation;
            with_view([&](View& view) { view.use(credentials_.of(id)); });
          },
      .on_lost = [this](std::uint32_t node,
                        const std::string& why) { with_view([&](View& view) { view.lose_node(node, why); }); },
      .on_left = [this](std::uint32_t node,
                        const std::string& why) { with_view([&](View& view) { view.leave_node(node, why); }); },
      .on_reachable =
          [this](std::uint32_t node) {
            with_worker([&](worker::Worker& worker) { worker.news().on_reachable(node); });
          },
      .on_view_ended =
          [this](const std::string& why) { with_view([&](View& view) { view.end_view(van::view_ended_error(why)); }); },
      .on_group =
          [this](const van::Group& group, std::function<void()> known) {
            with_view([&](View& view) { view.loops().add_group(group, std::move(known)); });
          },
      .on_tensor_failed =
          [this](std::uint32_t tensor, const std::string& why) {
            with_view([&](View& view) { view.loops().fail_tensor(tensor, why); });
            with_worker([&](worker::Worker& worker) { worker.news().fail_tensor(tensor, why); });
          },
      .on_round_failed =
          [this](const van::RoundFailed& failed) {
            with_worker([&](worker::Worker& worker) { worker.news().fail_round(failed); });
          },
      .on_beat =
          [this] {
            report_links();
            with_worker([this](worker::Worker& worker) {
              if (const auto late = worker.news().take_late_round()) van_->tell(*late);
            });
          },
      // The scheduler calls the shift off if there is no reply.
      .on_shift_begun =
          [this](const van::BeginShift& shift) {
            with_worker(
                [&](worker::Worker& worker) { van_->tell(van::Rounds{shift.number, worker.news().begin_shift()}); });
          },
      .on_shift_ended =
          [this](const van::EndShift& shift) {
            with_worker([&](worker::Worker& worker) { worker.planner().end_shift(shift); });
          },
      .find_stuck = [this](Duration silence) { return find_stuck(silence); },
      .is_in_use =
          [this] {
            const std::lock_guard lock(mutex_);
            return view_ && view_->loops().serves();
          },
  };
}

void CurrentView::report_links() {
  with_view([this](View& view) {
    const van::Membership& members = van_->membership();
    if (beats_++ % beats_per_link_use(members) != 0 || !van::can_shift(members)) return;
    view.loops().ask_link_use([van = van_](const van::LinkUse& use) { van->tell(use); });
  });
}

std::string CurrentView::find_stuck(Duration silence) {
  const std::lock_guard lock(mutex_);
  const std::string stuck = view_ ? view_->loops().find_stuck() : "";
  if (stuck.empty()) return stuck;
  if (silence >= to_duration(kRefusesCalls * options_.settings.deadlines.heartbeat)) {
    compress::CodecCall::refuse_behind(silence / 2);
  }
  return stuck + compress::CodecCall::describe_longest();
}

}  // namespace bps::node
