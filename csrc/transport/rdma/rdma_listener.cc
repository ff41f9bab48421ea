#include "transport/rdma/rdma_listener.h"

#include <sys/epoll.h>

#include <atomic>
#include <charconv>
#include <cstring>
#include <sstream>

#include "core/hmac.h"
#include "core/log.h"
#include "transport/rdma/device.h"

namespace bps::transport::rdma {
namespace {

constexpr int kBacklog = 1024;  // a whole job may call at the same moment
constexpr double kDeviceCheck_s = 1;
constexpr char kDigits[] = "0123456789abcdef";

class Listener final : public RdmaListener {
 public:
  Listener(EventLoop& loop, const Credentials& credentials, const std::vector<Rail>& rails, Enter enter)
      : loop_(loop), credentials_(credentials), enter_(std::move(enter)), channel_(make_cm_channel()) {
    random_bytes(address_.nonce);
    for (const Rail& rail : rails) {
      CmId id = make_cm_id(channel_.get());
      CmAddress here(rail.address, 0, rail.interface);
      if (::rdma_bind_addr(id.get(), here.get()) != 0 || ::rdma_listen(id.get(), kBacklog) != 0) {
        throw_errno("cannot listen on " + rail.address + " of " + rail.device, "`bps doctor` looks at the device");
      }
      address_.entries.push_back({rail.address, ntohs(::rdma_get_src_port(id.get()))});
      listeners_.push_back(std::move(id));
    }
    loop_.watch(channel_->fd, EPOLLIN, [this](std::uint32_t) { on_events(); });
    device_check_ = loop_.every(kDeviceCheck_s, [this] { close_removed(); });
  }
  ~Listener() override { loop_.forget(channel_->fd); }

  Bytes address() const override { return address_.encode(); }
  std::uint64_t refused() const override { return refused_; }

 private:
  void on_events() {
    CmEvent event;
    while (next_event(channel_.get(), event)) {
      if (event.type == RDMA_CM_EVENT_CONNECT_REQUEST) {
        judge(CmId(event.id), event.private_data);
      } else if (event.type == RDMA_CM_EVENT_DEVICE_REMOVAL) {
        std::erase_if(listeners_, [&](const CmId& id) { return id.get() == event.id; });
      }
      // The rest is about peers that gave up; accepting them will fail.
    }
  }

  void judge(CmId id, const Bytes& data) {
    Judgement judgement = judge_request(data, credentials_, address_.nonce);
    if (judgement.verdict == Judgement::Verdict::kWelcome && !seen_.remember(judgement.nonce)) {
      judgement.verdict = Judgement::Verdict::kRefused;  // a replay
      judgement.refusal = Refusal::kSecret;
    }
    if (judgement.verdict != Judgement::Verdict::kWelcome) {
      ++refused_;
      const RefusalData refusal = make_refusal(judgement.refusal);
      const bool tell = judgement.verdict == Judgement::Verdict::kRefused;
      ::rdma_reject(id.get(), tell ? refusal.data() : nullptr, tell ? std::uint8_t{kRefusalSize} : std::uint8_t{0});
      return;
    }
    RequestData request{};
    std::copy_n(data.begin(), request.size(), request.begin());
    enter_(std::make_unique<RdmaIncoming>(channel_, std::move(id), judgement.hello,
                                          make_reply(request, credentials_, address_.nonce)));
  }

  void close_removed() {
    std::erase_if(listeners_, [](const CmId& id) {
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
                                                 const std::vector<Rail>& rails, RdmaListener::Enter enter) {
  return std::make_unique<Listener>(loop, credentials, rails, std::move(enter));
}

Bytes ListenerAddress::encode() const {
  std::string text;
  for (const std::byte b : nonce) {
    text += kDigits[static_cast<unsigned>(b) >> 4];
    text += kDigits[static_cast<unsigned>(b) & 15];
  }
  for (const Entry& entry : entries) text += " " + entry.host + " " + std::to_string(entry.port);
  const auto bytes = as_bytes(text);
  return {bytes.begin(), bytes.end()};
}

ListenerAddress ListenerAddress::decode(std::span<const std::byte> bytes, const std::string& whom) {
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::istringstream in(text);
  ListenerAddress address;
  std::string digits;
  in >> digits;
  bool good = digits.size() == 2 * address.nonce.size();
  for (std::size_t i = 0; good && i < address.nonce.size(); ++i) {
    unsigned value = 0;
    const char* first = digits.data() + 2 * i;
    good = std::from_chars(first, first + 2, value, 16).ptr == first + 2;
    address.nonce[i] = static_cast<std::byte>(value);
  }
  Entry entry;
  while (good && in >> entry.host >> entry.port) address.entries.push_back(entry);
  if (!good || !in.eof() || address.entries.empty()) {
    throw Error(ErrorCode::kTransport, whom + " published the unusable rdma address '" + text + "'",
                "install the same bps_rdma version everywhere");
  }
  return address;
}

}  // namespace bps::transport::rdma
