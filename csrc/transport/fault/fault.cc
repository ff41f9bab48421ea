#include "transport/fault/fault.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
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
class FaultEndpoint final : public Endpoint, public DirectAccess, public Sink {
 public:
  FaultEndpoint(std::unique_ptr<Endpoint> owned, Endpoint* inner, const FaultPlan& plan, std::uint32_t number)
      : Endpoint(inner->is_data_plane, inner->hello),
        owned_(std::move(owned)),
        inner_(inner),
        plan_(plan),
        random_(plan.seed + number) {
    inner_->sink = this;
  }

  std::unique_ptr<Endpoint> release() { return std::move(owned_); }
  Endpoint* inner() const { return inner_; }
  void set_inner(Endpoint* inner) {
    inner_ = inner;
    inner_->sink = this;
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
  std::size_t post(std::span<const Descriptor> descriptors) override {
    const std::size_t accepted = how_many(descriptors.size());
    for (const Descriptor& o : descriptors.first(accepted)) {
      Held held;
      held.post = o;
      keep(held, o.header);
    }
    flush(false);
    return accepted;
  }
  Status send(std::span<const std::byte> message) override { return inner_->send(message); }
  void abandon() override {
    lost_ = true;
    tell_ = false;
    inner_->abandon();
  }

  DirectAccess* direct() override { return inner_->direct() == nullptr ? nullptr : this; }
  bool peer_reaches(const Region& region) const override { return inner_->direct()->peer_reaches(region); }
  std::byte* map(const RemoteSpan& span) override { return inner_->direct()->map(span); }
  Status get(const RemoteSpan& span, std::byte* into) override { return inner_->direct()->get(span, into); }
  Status put(const RemoteSpan& span, const std::byte* from) override { return inner_->direct()->put(span, from); }

  void on_write(Endpoint&, std::uint32_t immediate) override {
    if (!lost_) sink->on_write(*this, immediate);
  }
  void on_descriptor(Endpoint&, std::span<const std::byte> header, const RemoteSpan& span) override {
    if (!lost_) sink->on_descriptor(*this, header, span);
  }
  void on_written(Endpoint&, std::uint64_t token) override {
    if (!lost_) sink->on_written(*this, token);
  }
  void on_message(Endpoint&, std::span<const std::byte> message) override { sink->on_message(*this, message); }
  void on_lost(Endpoint&, const std::string& why) override {
    if (!std::exchange(lost_, true)) sink->on_lost(*this, why);
  }

  // What was held goes on, most of it, in a random order.
  int flush(bool polled) {
    if (held_.empty() || lost_) return 0;
    std::shuffle(held_.begin(), held_.end(), random_);
    int sent = 0;
    std::erase_if(held_, [&](Held& held) {
      if (!polled && chance(plan_.hold)) return false;
      const std::span<const std::byte> header(held.header.data(), held.header_size);
      held.write.header = held.post.header = header;
      const std::size_t took =
          held.is_write ? inner_->write({&held.write, 1}) : inner_->direct()->post({&held.post, 1});
      sent += static_cast<int>(took);
      return took == 1;
    });
    posted_ += static_cast<std::uint64_t>(sent);
    if (plan_.lose_after > 0 && posted_ >= plan_.lose_after && !lost_) {
      lost_ = true;
      tell_ = true;
    }
    return sent;
  }
  bool has_held() const { return (!held_.empty() && !lost_) || tell_; }
  void tell_loss() {
    if (std::exchange(tell_, false)) sink->on_lost(*this, "lost on purpose by the fault decorator");
  }

 private:
  struct Held {
    bool is_write = false;
    WriteOp write{};
    Descriptor post{};
    std::array<std::byte, kMaxHeader> header{};
    std::size_t header_size = 0;
  };

  bool chance(double p) { return p > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < p; }
  std::size_t how_many(std::size_t posted) {
    if (lost_ || !is_data_plane || held_.size() > 256 || chance(plan_.refuse)) return 0;
    if (chance(plan_.partial)) return std::uniform_int_distribution<std::size_t>(0, posted)(random_);
    return posted;
  }
  void keep(Held& held, std::span<const std::byte> header) {
    held.header_size = header.size();
    copy_bytes(header, held.header.data());
    held_.push_back(held);
  }

  std::unique_ptr<Endpoint> owned_;  // until it is attached
  Endpoint* inner_;
  const FaultPlan plan_;
  std::mt19937 random_;
  std::vector<Held> held_;
  std::uint64_t posted_ = 0;
  bool lost_ = false;
  bool tell_ = false;
};

FaultTransport::FaultTransport(std::unique_ptr<Transport> inner, FaultPlan plan)
    : inner_(std::move(inner)), plan_(plan) {}

FaultTransport::~FaultTransport() = default;

std::unique_ptr<Endpoint> FaultTransport::connect(std::span<const std::byte> address, const Hello& hello,
                                                  const Deadline& deadline, const std::string& whom) {
  auto made = inner_->connect(address, hello, deadline, whom);
  Endpoint* raw = made.get();
  return std::make_unique<FaultEndpoint>(std::move(made), raw, plan_, 0);
}

Endpoint* FaultTransport::accept(std::unique_ptr<IncomingConnection> incoming, Sink& sink) {
  // The inner endpoint may speak before the wrapper exists, but not before the next poll.
  Endpoint* made = inner_->accept(std::move(incoming), sink);
  endpoints_.push_back(std::make_unique<FaultEndpoint>(nullptr, made, plan_, ++endpoints_made_));
  endpoints_.back()->sink = &sink;
  return endpoints_.back().get();
}

Endpoint* FaultTransport::attach(std::unique_ptr<Endpoint> endpoint) {
  std::unique_ptr<FaultEndpoint> wrapper(static_cast<FaultEndpoint*>(endpoint.release()));
  wrapper->set_inner(inner_->attach(wrapper->release()));
  endpoints_.push_back(std::move(wrapper));
  return endpoints_.back().get();
}

void FaultTransport::close(Endpoint* endpoint) {
  for (auto it = endpoints_.begin(); it != endpoints_.end(); ++it) {
    if (it->get() != endpoint) continue;
    inner_->close((*it)->inner());
    endpoints_.erase(it);
    return;
  }
}

int FaultTransport::poll() {
  int found = inner_->poll();
  for (std::size_t i = 0; i < endpoints_.size(); ++i) {
    found += endpoints_[i]->flush(true);
    endpoints_[i]->tell_loss();
  }
  return found;
}

bool FaultTransport::arm() {
  for (const auto& endpoint : endpoints_) {
    if (endpoint->has_held()) return false;
  }
  return inner_->arm();
}

}  // namespace bps::transport::fault
