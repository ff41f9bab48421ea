// SPDX-License-Identifier: Apache-2.0
#include "model_rounds.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "core/codec.h"
#include "tensor/control_messages.h"
#include "view.h"

namespace bps::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::uint32_t kWorkers = 2;
constexpr std::uint32_t kServer = 2;           // its machine
constexpr std::uint64_t kElements = 4096;      // no small slot is large enough
constexpr auto kMostWait = milliseconds(300);  // before a call, of the order of deadlines and their checks
constexpr std::uint32_t kDeadlines = 2;        // of all calls, at most
constexpr double kNoHurry_s = 1000;
constexpr auto kPatience = seconds(60);
constexpr auto kSettles = seconds(10);

// The numbers of rounds.pml.
enum class What : std::uint32_t {
  kPushes = 1,
  kTakesPush,
  kCancels,
  kTakesCancel,
  kHearsAnswer,
  kHearsCredit,
  kHearsFailed,
  kHearsAborted,
  kHearsAnswered,
  kCompletes,
  kGivesUp,
  kSums,
  kHolds,
};

class Job final : public Tap {
 public:
  explicit Job(std::uint64_t seed);
  std::vector<std::uint32_t> run();

 private:
  struct Call {
    Time start{};
    std::vector<std::byte> memory;
    std::shared_ptr<worker::Operation> operation;
    bool has_ended = false;
  };
  struct Member {
    Machine machine = 0;
    std::deque<std::unique_ptr<transport::IncomingConnection>> incoming;
    std::unique_ptr<View> view;
    bool has_begun = false;  // it has its landing slot
    std::array<Call, 2> calls;
    std::uint32_t first = 0;  // which it makes first
    std::uint32_t made = 0;
  };

  void step(Member& member);
  void work(Member& worker);
  void start(Member& worker, std::uint32_t tensor);
  void end(Member& worker, std::uint32_t tensor);
  bool has_ended() const;
  void on_message(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> message) override;
  void on_write(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> header,
                std::uint32_t immediate) override;
  void note(What what, std::uint32_t worker, std::uint32_t detail = 0) {
    actions_.push_back(16 * static_cast<std::uint32_t>(what) + 4 * worker + detail);
  }
  // The tensor whose answer has this immediate.
  std::uint32_t tensor_of(std::uint32_t worker, std::uint32_t immediate) const {
    return tensor_of_.at({worker, immediate});
  }

  static Shape draw(Random& random);

  EventQueue events_;
  Trace trace_{events_, false};
  Random random_;
  const Shape shape_;
  Network network_;
  std::array<Member, kWorkers + 1> members_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> tensor_of_;
  std::array<bool, 2> is_summed_{};
  std::uint32_t deadlines_ = kDeadlines;  // that may still pass
  std::vector<std::uint32_t> actions_;
};

// A network so slow that deadlines pass while messages are on their way.
Shape Job::draw(Random& random) {
  Shape made;
  made.least = 0;
  made.partition_bytes = 4 * kElements;
  made.window = 1;
  made.tensors = {{.elements = kElements}, {.elements = kElements}};
  made.silence = kPatience;
  made.conditions.delay = random.between(milliseconds(1), milliseconds(20));
  made.conditions.jitter = random.between(milliseconds(1), milliseconds(150));
  made.conditions.window = 1 + random.below(4);
  made.conditions.refuse = random.chance(0.5) ? 0.2 : 0;
  made.conditions.patience = kPatience;
  made.conditions.by_process = random.chance(0.5);
  return made;
}

Job::Job(std::uint64_t seed)
    : random_(seed), shape_(draw(random_)), network_(events_, random_, trace_, shape_.conditions) {
  network_.tap = this;
  van::Membership membership;
  membership.workers = kWorkers;
  membership.servers = 1;
  for (std::uint32_t i = 0; i <= kWorkers; ++i) {
    van::Node node;
    node.id = i + 1;
    (i == kServer ? node.server_rank : node.worker_rank) = i == kServer ? 0 : static_cast<std::int32_t>(i);
    node.worker_loops = i == kServer ? 0 : 1;
    node.server_loops = 1;
    node.identity = i + 1;
    membership.nodes.push_back(node);
  }
  for (Member& member : members_) {
    member.machine = network_.add([this, &member] { step(member); });
  }
  for (Member& member : members_) {
    member.view =
        std::make_unique<View>(shape_, network_, membership, member.machine + 1, std::vector<Machine>{0, 1, kServer});
    network_.listen(member.machine, membership.epoch, [this, &member](auto incoming) {
      member.incoming.push_back(std::move(incoming));
      network_.wake(member.machine);
    });
    member.first = static_cast<std::uint32_t>(random_.below(2));
    network_.wake(member.machine);
  }
}

void Job::step(Member& member) {
  for (; !member.incoming.empty(); member.incoming.pop_front()) member.view->accept(std::move(member.incoming.front()));
  const bool found = member.view->turn();
  if (member.machine != kServer) work(member);
  if (found || member.view->blocked()) network_.wake_at(member.machine, events_.now() + std::chrono::microseconds(500));
  network_.wake_at(member.machine, member.view->next_timer());
}

void Job::work(Member& worker) {
  if (!worker.has_begun) {
    if (!worker.view->has_slots()) return;
    if (worker.view->servers[0]->slots.large() != 1) throw Violation("a worker does not begin with one landing slot");
    worker.has_begun = true;
    Time when = events_.now();
    for (const std::uint32_t tensor : {worker.first, 1 - worker.first}) {
      when += random_.between({}, kMostWait);
      worker.calls[tensor].start = when;
      network_.wake_at(worker.machine, when);
    }
  }
  for (std::uint32_t tensor = 0; tensor < 2; ++tensor) end(worker, tensor);
  while (worker.made < 2) {
    const std::uint32_t next = worker.made == 0 ? worker.first : 1 - worker.first;
    if (worker.calls[next].start > events_.now()) return network_.wake_at(worker.machine, worker.calls[next].start);
    start(worker, next);
    ++worker.made;
  }
}

void Job::start(Member& worker, std::uint32_t tensor) {
  Call& call = worker.calls[tensor];
  call.memory.assign(4 * kElements, std::byte{static_cast<unsigned char>(1 + worker.machine)});
  worker::Request request;
  request.input = request.output = call.memory.data();
  request.input_allocation = request.output_allocation = {call.memory, 1 + tensor};
  const bool is_hasty = deadlines_ > 0 && random_.chance(0.5);
  if (is_hasty) --deadlines_;
  request.timeout_s = is_hasty ? 1e-3 * static_cast<double>(random_.below(400)) : kNoHurry_s;
  call.operation = std::make_shared<worker::Operation>(worker.view->tensors[tensor], request, 0, worker.made, 1,
                                                       worker.view->places());
  worker.view->worker_loop->submit(call.operation, true);
  network_.wake(worker.machine);
}

void Job::end(Member& worker, std::uint32_t tensor) {
  Call& call = worker.calls[tensor];
  if (!call.operation || call.has_ended || !call.operation->is_done()) return;
  call.has_ended = true;
  if (call.operation->failure()) return note(What::kGivesUp, worker.machine, tensor);
  if (std::ranges::any_of(call.memory, [](std::byte one) { return one != std::byte{3}; })) {
    throw Violation("a wrong sum");
  }
  note(What::kCompletes, worker.machine, tensor);
}

bool Job::has_ended() const {
  return std::ranges::all_of(members_, [](const Member& one) {
    return one.machine == kServer || (one.calls[0].has_ended && one.calls[1].has_ended);
  });
}

std::vector<std::uint32_t> Job::run() {
  const Time begin = events_.now();
  while (!has_ended()) {
    if (!events_.run_next() || events_.now() > begin + kPatience) throw Violation("the calls do not end");
  }
  const Time end = events_.now() + kSettles;
  while (events_.now() < end && events_.run_next()) {
  }
  for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
    note(What::kHolds, worker, static_cast<std::uint32_t>(members_[worker].view->servers[0]->slots.large()));
  }
  return actions_;
}

void Job::on_message(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> message) {
  const std::optional<tensor::ControlMessage> decoded = tensor::decode(message, 1);
  if (!decoded) throw Violation("a control message cannot be read");
  if (const auto* cancel = std::get_if<tensor::Cancel>(&*decoded)) {
    tensor_of_[{from, cancel->partitions.at(0).immediate}] = cancel->tensor - 1;
    note(moment == Moment::kSent ? What::kCancels : What::kTakesCancel, from, cancel->tensor - 1);
  }
  if (moment == Moment::kSent) return;
  if (const auto* credits = std::get_if<tensor::Credits>(&*decoded)) {
    for (const tensor::SlotCredit& slot : credits->slots) {
      if (members_[to].has_begun && !tensor::is_small_slot(slot.capacity)) note(What::kHearsCredit, to);
    }
  } else if (const auto* failed = std::get_if<tensor::PushFailed>(&*decoded)) {
    note(What::kHearsFailed, to, tensor_of(to, failed->immediate));
  } else if (const auto* cancelled = std::get_if<tensor::Cancelled>(&*decoded)) {
    for (const std::uint32_t one : cancelled->aborted) note(What::kHearsAborted, to, tensor_of(to, one));
    for (const std::uint32_t one : cancelled->answered) note(What::kHearsAnswered, to, tensor_of(to, one));
  }
}

void Job::on_write(Moment moment, std::uint32_t from, std::uint32_t to, std::span<const std::byte> header,
                   std::uint32_t immediate) {
  if (from == kServer) {
    const std::uint32_t tensor = tensor_of(to, immediate);
    if (moment == Moment::kTaken) return note(What::kHearsAnswer, to, tensor);
    if (!std::exchange(is_summed_[tensor], true)) note(What::kSums, 0, tensor);
    return;
  }
  const auto push = codec::decode_front<tensor::PushHeader>(header);
  if (!push) throw Violation("a push has no header");
  tensor_of_[{from, push->immediate}] = push->tensor - 1;
  note(moment == Moment::kSent ? What::kPushes : What::kTakesPush, from, push->tensor - 1);
}

}  // namespace

std::vector<std::uint32_t> record_rounds(std::uint64_t seed) {
  return Job(seed).run();
}

}  // namespace bps::sim
