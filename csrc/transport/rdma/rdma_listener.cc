// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/rdma_listener.h"

#include <sys/epoll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "core/hmac.h"
#include "core/log.h"
#include "transport/rdma/device.h"
#include "transport/rdma/listener_address.h"

namespace bps::transport::rdma {
namespace {

constexpr int kBacklog = 1024;  // a whole job may call at the same moment

class Listener final : public RdmaListener {
 public:
  Listener(EventLoop& loop, const Credentials& credentials, const std::vector<Rail>& rails, const PortRange& ports,
           Enter enter)
      : loop_(loop), credentials_(credentials), enter_(std::move(enter)), channel_(make_cm_channel()) {
    random_bytes(address_.nonce);
    for (const Rail& rail : rails) {
      CmId id = listen_within(ports, [&](std::uint16_t port) { return listen_on(rail, port); });
      address_.entries.push_back({rail.address, ntohs(::rdma_get_src_port(id.get())), rail.speed});
      listeners_.push_back(std::move(id));
    }
    log_debug("listens by rdma at " + address_.describe());
    loop_.watch(channel_->fd, EPOLLIN, [this](std::uint32_t) { on_events(); });
    device_check_ = loop_.every(kDeviceCheck_s, [this] { close_removed(); });
  }
  ~Listener() override { loop_.forget(channel_->fd); }

  Bytes address() const override { return codec::encode(address_); }
  std::uint64_t refused() const override { return refused_; }

 private:
  CmId listen_on(const Rail& rail, std::uint16_t port) const {
    CmId id = make_cm_id(channel_.get());
    CmAddress here(rail.address, port, rail.interface);
    if (::rdma_bind_addr(id.get(), here.get()) == 0 && ::rdma_listen(id.get(), kBacklog) == 0) return id;
    const std::string what = "cannot listen on " + rail.address + " of " + rail.device;
    if (errno == EADDRINUSE) {
      throw Error(ErrorCode::kPortTaken, what + ": port " + std::to_string(port) + " is taken", "choose a free port");
    }
    throw_errno(what, "`bps doctor` looks at the device");
  }

  void on_events() {
    CmEvent event;
    while (next_event(channel_.get(), event)) {
      if (event.type == RDMA_CM_EVENT_CONNECT_REQUEST) {
        judge(CmId(event.id), rail_of(event.listener), event.private_data);
      } else if (event.type == RDMA_CM_EVENT_DEVICE_REMOVAL) {
        close_if([&](const CmId& id) { return id.get() == event.id; });
      }
      // The other events are about peers that gave up; accepting them will fail.
    }
  }

  // A listener that was closed keeps its place, because the place is the number of the rail.
  template <typename F>
  void close_if(F gone) {
    for (CmId& id : listeners_) {
      if (id && gone(id)) id.reset();
    }
  }
  std::size_t rail_of(const rdma_cm_id* listener) const {
    const auto found = std::ranges::find(listeners_, listener, [](const CmId& id) { return id.get(); });
    return static_cast<std::size_t>(found - listeners_.begin());
  }

  void judge(CmId id, std::size_t rail, const Bytes& data) {
    if (rail == listeners_.size()) return;  // the listener was closed in the meantime
    Judgement judgement = judge_request(data, credentials_, address_.nonce);
    if (judgement.verdict == Judgement::Verdict::kAccepted && !seen_.remember(judgement.nonce)) {
      judgement.verdict = Judgement::Verdict::kRefused;  // the request is a replay
      judgement.refusal = Refusal::kSecret;
    }
    if (judgement.verdict != Judgement::Verdict::kAccepted) {
      ++refused_;
      const RefusalData refusal = make_refusal(judgement.refusal);
      const bool tell = judgement.verdict == Judgement::Verdict::kRefused;
      ::rdma_reject(id.get(), tell ? refusal.data() : nullptr,
                    tell ? static_cast<std::uint8_t>(refusal.size()) : std::uint8_t{0});
      return;
    }
    RequestData request{};
    std::copy_n(data.begin(), request.size(), request.begin());
    enter_(std::make_unique<RdmaIncoming>(channel_, rail, std::move(id), judgement.hello,
                                          make_reply(request, credentials_, address_.nonce)));
  }

  void close_removed() {
    close_if([](const CmId& id) {
      if (id->verbs == nullptr || !is_removed(*id->verbs)) return false;
      let_go(*id->verbs);
      return true;
    });
  }

  EventLoop& loop_;
  const Credentials& credentials_;
  const Enter enter_;
  const std::shared_ptr<rdma_event_channel> channel_;
  std::vector<CmId> listeners_;
  ListenerAddress address_;
  NonceMemory seen_;
  std::atomic<std::uint64_t> refused_{0};
  Timer device_check_;
};

}  // namespace

std::unique_ptr<RdmaListener> open_rdma_listener(EventLoop& loop, const Credentials& credentials,
                                                 const std::vector<Rail>& rails, const PortRange& ports,
                                                 RdmaListener::Enter enter) {
  return std::make_unique<Listener>(loop, credentials, rails, ports, std::move(enter));
}

}  // namespace bps::transport::rdma
