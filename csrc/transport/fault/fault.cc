// SPDX-License-Identifier: Apache-2.0
#include "transport/fault/fault.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>

namespace bps::transport::fault {

FaultPlan FaultPlan::parse(const std::string& text) {
  FaultPlan plan;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t equals = item.find('=');
    const std::string name = item.substr(0, equals);
    char* stop = nullptr;
    const double value = equals == std::string::npos ? -1 : std::strtod(item.c_str() + equals + 1, &stop);
    const bool number = stop != nullptr && *stop == '\0' && value >= 0;
    if (number && name == "seed")
      plan.seed = static_cast<std::uint32_t>(value);
    else if (number && name == "refuse")
      plan.refuse = value;
    else if (number && name == "partial")
      plan.partial = value;
    else if (number && name == "hold")
      plan.hold = value;
    else if (number && name == "lose_after")
      plan.lose_after = static_cast<std::uint64_t>(value);
    else {
      throw Error(ErrorCode::kInvalidArgument, "BPS_FAULT: '" + item + "' is not understood",
                  "use seed, refuse, partial, hold and lose_after, each with =number");
    }
  }
  return plan;
}

// Stands between the user of an endpoint and the real one, in both directions.
class FaultData final : public DataEndpoint, public DirectAccess, public DataSink {
 public:
  FaultData(const Hello& opened_by, const FaultPlan& plan, std::uint32_t number)
      : DataEndpoint(opened_by), plan_(plan), random_(plan.seed + number) {}

  // This is the real endpoint, before it is attached and after.
  std::unique_ptr<DataEndpoint> unattached;
  DataEndpoint* inner = nullptr;
  void wrap(DataEndpoint* real) {
    inner = real;
    rails = real->rails;
    direct_ = real->direct() == nullptr ? nullptr : this;
    longest_piece_ = real->longest_piece();
  }

  std::size_t write(std::span<const WriteOp> ops) override {
    const std::size_t accepted = how_many(ops.size());
    for (const WriteOp& op : ops.first(accepted)) {
      Held held;
      held.is_write = true;
      held.write = op;
      keep(held, op.header);
    }
    flush(false);
    return accepted;
  }
  std::size_t post(std::span<const Posting> postings) override {
    const std::size_t accepted = how_many(postings.size());
    for (const Posting& o : postings.first(accepted)) {
      Held held;
      held.post = o;
      keep(held, o.header);
    }
    flush(false);
    return accepted;
  }
  Carried take_carried() override { return inner->take_carried(); }
  bool peer_reaches(const Region& region) const override { return inner->direct()->peer_reaches(region); }
  bool peer_maps(const Region& region) const override { return inner->direct()->peer_maps(region); }
  std::byte* map(const RemoteSpan& span) override { return inner->direct()->map(span); }
  Status get(const RemoteSpan& span, std::byte* into) override { return inner->direct()->get(span, into); }
  Status put(const RemoteSpan& span, const std::byte* from) override { return inner->direct()->put(span, from); }
  bool share(const Region& region) override { return inner->direct()->share(region); }
  // A redo log would know nothing of what the peer has posted and this decorator loses, so there is none.
  std::shared_ptr<shm::SharedMemory> hold(const RemoteSpan&) override { return nullptr; }
  bool is_fenced() override { return inner->direct()->is_fenced(); }
  void take_rest() override { inner->take_rest(); }
  bool can_fence() const override { return inner->direct()->can_fence(); }
  void fence() override { inner->direct()->fence(); }

  std::size_t allows_write(DataEndpoint&, const RemoteSpan& where, std::uint32_t immediate) override {
    return is_lost() ? 0 : sink->allows_write(*this, where, immediate);
  }
  void on_write(DataEndpoint&, std::uint32_t immediate, std::uint64_t landed) override {
    if (!is_lost()) sink->on_write(*this, immediate, landed);
  }
  void on_posting(DataEndpoint&, std::span<const std::byte> header, const RemoteSpan& span) override {
    if (!is_lost()) sink->on_posting(*this, header, span);
  }
  void on_written(DataEndpoint&, std::uint64_t token) override { sink->on_written(*this, token); }
  void on_lost(Endpoint&, const std::string& why) override {
    lose(why);
    tell_loss();
  }

  // Gives up the writes that were held, once their connection is lost.
  int give_up_held() {
    if (!is_lost() || held_.empty()) return 0;
    const std::vector<Held> held = std::exchange(held_, {});
    for (const Held& one : held) {
      if (one.is_write && one.write.token != kNoToken) sink->on_written(*this, one.write.token);
    }
    return static_cast<int>(held.size());
  }
  // Sends most of the writes that were held, in a random order.
  int flush(bool polled) {
    if (held_.empty() || is_lost()) return 0;
    std::shuffle(held_.begin(), held_.end(), random_);
    int sent = 0;
    std::erase_if(held_, [&](Held& held) {
      if (!polled && chance(plan_.hold)) return false;
      const std::span<const std::byte> header(held.header.data(), held.header_size);
      held.write.header = held.post.header = header;
      const std::size_t took = held.is_write ? inner->write({&held.write, 1}) : inner->direct()->post({&held.post, 1});
      sent += static_cast<int>(took);
      return took == 1;
    });
    posted_ += static_cast<std::uint64_t>(sent);
    if (plan_.lose_after > 0 && posted_ >= plan_.lose_after) lose("lost on purpose by the fault decorator");
    return sent;
  }
  bool has_held() const { return !held_.empty() || is_loss_untold(); }
  using Endpoint::tell_loss;

 private:
  struct Held {
    bool is_write = false;
    WriteOp write{};
    Posting post{};
    std::array<std::byte, kMaxHeader> header{};
    std::size_t header_size = 0;
  };

  bool chance(double p) { return p > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < p; }
  std::size_t how_many(std::size_t posted) {
    if (is_lost() || held_.size() > 256 || chance(plan_.refuse)) return 0;
    if (chance(plan_.partial)) return std::uniform_int_distribution<std::size_t>(0, posted)(random_);
    return posted;
  }
  void keep(Held& held, std::span<const std::byte> header) {
    held.header_size = header.size();
    copy_bytes(header, held.header.data());
    held_.push_back(held);
  }

  void sever() override { inner->abandon(); }

  const FaultPlan plan_;
  std::mt19937 random_;
  std::vector<Held> held_;
  std::uint64_t posted_ = 0;
};

FaultTransport::FaultTransport(std::unique_ptr<Transport> inner, FaultPlan plan)
    : inner_(std::move(inner)), plan_(plan) {}

FaultTransport::~FaultTransport() = default;

std::unique_ptr<ControlEndpoint> FaultTransport::connect_control(const ConnectRequest& request) {
  return inner_->connect_control(request);
}

std::unique_ptr<DataEndpoint> FaultTransport::connect_data(const ConnectRequest& request) {
  auto made = std::make_unique<FaultData>(request.hello_for(Plane::kData), plan_, 0);
  made->unattached = inner_->connect_data(request);
  made->wrap(made->unattached.get());
  return made;
}

ControlEndpoint* FaultTransport::attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) {
  return inner_->attach(std::move(endpoint), sink);
}

DataEndpoint* FaultTransport::attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) {
  endpoint->sink = &sink;
  datas_.emplace_back(static_cast<FaultData*>(endpoint.release()));
  FaultData& wrapper = *datas_.back();
  wrapper.inner = inner_->attach(std::move(wrapper.unattached), wrapper);
  return &wrapper;
}

ControlEndpoint* FaultTransport::accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) {
  return inner_->accept_control(std::move(incoming), sink);
}

DataEndpoint* FaultTransport::accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) {
  auto made = std::make_unique<FaultData>(incoming->hello, plan_, ++endpoints_made_);
  made->sink = &sink;
  made->wrap(inner_->accept_data(std::move(incoming), *made));
  datas_.push_back(std::move(made));
  return datas_.back().get();
}

void FaultTransport::close(Endpoint* endpoint) {
  const auto found = std::ranges::find_if(datas_, [&](const auto& owned) { return owned.get() == endpoint; });
  if (found == datas_.end()) return inner_->close(endpoint);
  inner_->close((*found)->inner);
  datas_.erase(found);
}

int FaultTransport::poll() {
  int found = inner_->poll();
  for (std::size_t i = 0; i < datas_.size(); ++i) {
    found += datas_[i]->flush(true) + datas_[i]->give_up_held();
    datas_[i]->tell_loss();
  }
  return found;
}

bool FaultTransport::arm() {
  for (const auto& endpoint : datas_) {
    if (endpoint->has_held()) return false;
  }
  return inner_->arm();
}

}  // namespace bps::transport::fault
