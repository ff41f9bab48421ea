#include "transport/local/self_transport.h"

#include <cstring>

namespace bps::transport::local {

// One end. What it posts is queued at the other end and delivered by the next poll(): callbacks never nest.
class SelfTransport::Half final : public Endpoint, public DirectAccess {
 public:
  Half(bool data_plane, const Hello& made_by, Counters& counters)
      : Endpoint(data_plane, made_by), counters_(counters) {}

  std::size_t write(std::span<const WriteOp> ops) override {
    if (other == nullptr) return 0;
    for (const WriteOp& op : ops) {
      std::byte* target = to_pointer(op.target.address);
      copy_bytes(op.header, target);
      if (op.length > 0) {
        std::memcpy(target + op.header.size(), op.source->bytes().data() + op.source_offset, op.length);
      }
      counters_.data_writes.add();
      counters_.data_bytes.add(op.length);
      other->writes.push_back(op.immediate);
      if (op.token != kNoToken) written.push_back(op.token);
    }
    return ops.size();
  }

  std::size_t post(std::span<const Descriptor> ops) override {
    if (other == nullptr) return 0;
    for (const Descriptor& o : ops) {
      Posted posted{};
      copy_bytes(o.header, posted.header);
      posted.header_size = o.header.size();
      if (o.length > 0) posted.span = o.source->remote(o.source_offset, o.length);
      counters_.data_writes.add();
      counters_.data_bytes.add(o.length);
      other->descriptors.push_back(posted);
    }
    return ops.size();
  }

  Status send(std::span<const std::byte> message) override {
    if (other == nullptr) return Status::kPeerLost;
    if (message.size() > kMaxMessage) return Status::kProtocol;
    counters_.control_messages.add();
    counters_.control_bytes.add(message.size());
    other->messages.emplace_back(message.begin(), message.end());
    return Status::kOk;
  }

  void abandon() override {}  // a process that lost itself reports nothing any more
  DirectAccess* direct() override { return this; }
  bool peer_reaches(const Region&) const override { return true; }
  // Same process: addresses are pointers that this process itself wrote, so there is no wire to distrust.
  std::byte* map(const RemoteSpan& span) override { return to_pointer(span.address); }
  Status get(const RemoteSpan& span, std::byte* into) override {
    std::memcpy(into, to_pointer(span.address), span.length);
    return Status::kOk;
  }
  Status put(const RemoteSpan& span, const std::byte* from) override {
    std::memcpy(to_pointer(span.address), from, span.length);
    return Status::kOk;
  }

  int deliver() {
    if (idle()) return 0;
    std::swap(descriptors, descriptors_now);
    std::swap(writes, writes_now);
    std::swap(written, written_now);
    std::swap(messages, messages_now);
    for (const Posted& o : descriptors_now) sink->on_descriptor(*this, {o.header, o.header_size}, o.span);
    for (const std::uint32_t immediate : writes_now) sink->on_write(*this, immediate);
    for (const std::uint64_t token : written_now) sink->on_written(*this, token);
    for (const Bytes& message : messages_now) sink->on_message(*this, message);
    const auto count = descriptors_now.size() + writes_now.size() + written_now.size() + messages_now.size();
    descriptors_now.clear();
    writes_now.clear();
    written_now.clear();
    messages_now.clear();
    return static_cast<int>(count);
  }
  bool idle() const { return descriptors.empty() && writes.empty() && written.empty() && messages.empty(); }

  Half* other = nullptr;

 private:
  struct Posted {
    std::byte header[kMaxHeader];
    std::size_t header_size;
    RemoteSpan span;
  };
  static std::byte* to_pointer(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

  Counters& counters_;
  // What waits here for the next poll, and what the running poll delivers.
  std::vector<Posted> descriptors, descriptors_now;
  std::vector<std::uint32_t> writes, writes_now;
  std::vector<std::uint64_t> written, written_now;
  std::vector<Bytes> messages, messages_now;
};

namespace {

class SelfRegion final : public Region {
 public:
  explicit SelfRegion(std::span<std::byte> bytes) : Region(bytes) {
    origin_ = reinterpret_cast<std::uint64_t>(bytes.data());
  }
};

}  // namespace

SelfTransport::SelfTransport(Counters& counters) : counters_(counters) {}
SelfTransport::~SelfTransport() = default;

RegionPtr SelfTransport::register_memory(std::span<std::byte> bytes) {
  return std::make_shared<SelfRegion>(bytes);
}

std::unique_ptr<Endpoint> SelfTransport::connect(std::span<const std::byte>, const Hello&, const Deadline&,
                                                 const std::string&) {
  throw Error(ErrorCode::kInternal, "a process connects to itself by connect_pair()", "report this as a bug");
}

std::pair<Endpoint*, Endpoint*> SelfTransport::connect_pair(const Hello& hello) {
  const bool data = hello.plane == Plane::kData;
  auto caller = std::make_unique<Half>(data, hello, counters_);
  auto callee = std::make_unique<Half>(data, hello, counters_);
  caller->other = callee.get();
  callee->other = caller.get();
  halves_.push_back(std::move(caller));
  halves_.push_back(std::move(callee));
  return {halves_[halves_.size() - 2].get(), halves_.back().get()};
}

void SelfTransport::close(Endpoint* endpoint) {
  for (auto it = halves_.begin(); it != halves_.end(); ++it) {
    if (it->get() != endpoint) continue;
    if ((*it)->other != nullptr) (*it)->other->other = nullptr;
    halves_.erase(it);
    return;
  }
}

int SelfTransport::poll() {
  int delivered = 0;
  for (std::size_t i = 0; i < halves_.size(); ++i) delivered += halves_[i]->deliver();
  return delivered;
}

bool SelfTransport::arm() {
  for (const auto& half : halves_) {
    if (!half->idle()) return false;
  }
  return true;
}

}  // namespace bps::transport::local
