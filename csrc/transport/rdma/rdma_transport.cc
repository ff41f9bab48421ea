#include "transport/rdma/rdma_transport.h"

#include <algorithm>

#include "transport/rdma/device.h"
#include "transport/rdma/listener_address.h"
#include "transport/rdma/rdma_control.h"
#include "transport/rdma/rdma_data.h"
#include "transport/rdma/rdma_listener.h"

namespace bps::transport::rdma {
namespace {

std::unique_ptr<RdmaEndpoint> make_endpoint(const Hello& hello, TransportState& state, RcConnection connection) {
  if (hello.plane == Plane::kControl) return std::make_unique<RdmaControl>(hello, state, std::move(connection));
  return std::make_unique<RdmaData>(hello, state, std::move(connection));
}

}  // namespace

RdmaTransport::RdmaTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, const Rail& rail,
                             const RdmaOptions& options)
    : loop_(loop),
      credentials_(credentials),
      context_(std::make_shared<Context>(rail, options)),
      registrations_(std::make_shared<Registrations>(*context_)),
      home_{*context_, *registrations_, counters},
      channel_(make_cm_channel()),
      anchor_(make_cm_id(channel_.get())) {
  CmAddress here(rail.address, 0, rail.interface);
  if (::rdma_bind_addr(anchor_.get(), here.get()) != 0) {
    throw_errno("the RDMA connection manager cannot use " + rail.address + " of " + rail.device,
                "check that the address belongs to an interface that is up (ip addr), or set BPS_RDMA_GID_INDEX");
  }
  watch();
}

RdmaTransport::~RdmaTransport() {
  if (context_) let_go_of_device();
}

RegionPtr RdmaTransport::register_memory(std::span<std::byte> bytes) {
  return std::make_shared<RdmaRegion>(bytes, registrations_);
}

std::shared_ptr<Context> RdmaTransport::context() const {
  const std::lock_guard lock(context_mutex_);
  if (!context_) throw Error(ErrorCode::kUnreachable, "the RDMA device is gone", "restart the job");
  return context_;
}

std::unique_ptr<Endpoint> RdmaTransport::connect(std::span<const std::byte> address, const Hello& hello,
                                                 const Deadline& deadline, const std::string& whom) {
  const std::shared_ptr<Context> share = context();
  const auto listener = codec::decode<ListenerAddress>(address);
  if (!listener) {
    throw Error(ErrorCode::kTransport, whom + " published an invalid RDMA address",
                "install the same bps_rdma version everywhere");
  }
  const auto& [host, port] = listener->entries[hello.server_loop % listener->entries.size()];
  return make_endpoint(hello, home_, call(share, host, port, listener->nonce, hello, credentials_, deadline, whom));
}

Endpoint* RdmaTransport::accept(std::unique_ptr<IncomingConnection> incoming, Sink& sink) {
  const std::shared_ptr<Context> share = context();
  auto& pending = static_cast<RdmaIncoming&>(*incoming);
  if (::rdma_migrate_id(pending.id.get(), channel_.get()) != 0) throw_errno("cannot take over a connection");
  auto made = make_endpoint(pending.hello, home_, RcConnection(share, std::move(pending.id), pending.hello.plane));
  made->sink = &sink;
  made->connection.welcome(pending.reply);
  return own(std::move(made));
}

Endpoint* RdmaTransport::attach(std::unique_ptr<Endpoint> endpoint) {
  std::unique_ptr<RdmaEndpoint> made(static_cast<RdmaEndpoint*>(endpoint.release()));
  try {
    if (!context_) throw Error(ErrorCode::kPeerLost, "the RDMA device is gone", "");
    made->connection.establish(channel_.get());
  } catch (const Error& error) {
    made->lose(error.what());  // told by the next poll, as any other loss
  }
  return own(std::move(made));
}

RdmaEndpoint* RdmaTransport::own(std::unique_ptr<RdmaEndpoint> endpoint) {
  RdmaEndpoint* one = endpoint.get();
  endpoints_.push_back(std::move(endpoint));
  by_number_[one->connection.queue_pair().number()] = one;
  one->connection.id()->context = one;
  return one;
}

void RdmaTransport::close(Endpoint* endpoint) {
  const auto found = std::ranges::find_if(endpoints_, [&](const auto& owned) { return owned.get() == endpoint; });
  if (found == endpoints_.end()) return;
  std::erase_if(by_number_, [&](const auto& entry) { return entry.second == found->get(); });
  (*found)->closed = true;
  (*found)->connection.break_off();
  (*found)->drop();
  closed_.push_back(std::move(*found));
  endpoints_.erase(found);
}

std::unique_ptr<Transport> make_rdma_transport(EventLoop& loop, const Credentials& credentials, Counters& counters,
                                               const Rail& rail, const RdmaOptions& options) {
  return std::make_unique<RdmaTransport>(loop, credentials, counters, rail, options);
}

}  // namespace bps::transport::rdma
