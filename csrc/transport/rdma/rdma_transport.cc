// SPDX-License-Identifier: Apache-2.0
#include "transport/rdma/rdma_transport.h"

#include "transport/control_paths.h"
#include "transport/rdma/listener_address.h"
#include "transport/rdma/rdma_control.h"
#include "transport/rdma/rdma_data.h"
#include "transport/rdma/rdma_listener.h"

namespace bps::transport::rdma {
RdmaTransport::RdmaTransport(EventLoop& loop, const Credentials& credentials, Counters& counters, const Rail& rail,
                             std::uint8_t rail_number, const RdmaOptions& options)
    : loop_(loop),
      credentials_(credentials),
      context_(std::make_shared<Context>(rail, options)),
      registrations_(std::make_shared<Registrations>(*context_)),
      callers_memory_(options.callers_memory),
      state_{*context_, *registrations_, counters, rail_number},
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
  return std::make_shared<RdmaRegion>(bytes, std::span(&registrations_, 1));
}

RegionPtr RdmaTransport::register_foreign(const ForeignMemory& memory) {
  return std::make_shared<RdmaRegion>(memory, std::span(&registrations_, 1));
}

std::size_t RdmaTransport::rail_pairs(std::span<const std::byte> address) const {
  const auto listener = codec::decode<ListenerAddress>(address);
  return listener ? listener->entries.size() : 1;
}

std::shared_ptr<Context> RdmaTransport::context() const {
  const std::lock_guard lock(context_mutex_);
  if (!context_) throw Error(ErrorCode::kUnreachable, "the RDMA device is gone", "restart the job");
  return context_;
}

// Runs on the caller's thread. Completes `rails`.
RcConnection RdmaTransport::open(const ConnectRequest& request, Plane plane, Rails& rails) {
  const std::shared_ptr<Context> share = context();
  const auto listener = codec::decode<ListenerAddress>(request.address);
  if (!listener) {
    throw Error(ErrorCode::kTransport, request.whom + " published an invalid RDMA address",
                "install the same bps_rdma version everywhere");
  }
  rails.there = rails_of(request.connection, 1, listener->entries.size()).there;
  const auto& [host, port, speed] = listener->entries[rails.there];
  rails.speed = slower(share->rail().speed, speed);
  return connect_rc(share, host, port, listener->nonce, request.hello_for(plane), credentials_, request.deadline,
                    request.whom);
}

std::unique_ptr<ControlEndpoint> RdmaTransport::connect_control(const ConnectRequest& request) {
  Rails rails{.here = state_.rail};
  auto made =
      std::make_unique<RdmaControl>(request.hello_for(Plane::kControl), state_, open(request, Plane::kControl, rails));
  made->rails = rails;
  return made;
}

std::unique_ptr<DataEndpoint> RdmaTransport::connect_data(const ConnectRequest& request) {
  Rails rails{.here = state_.rail};
  auto made = std::make_unique<RdmaData>(request.hello_for(Plane::kData), state_, open(request, Plane::kData, rails));
  made->rails = rails;
  return made;
}

template <typename E, typename S>
E* RdmaTransport::establish(std::unique_ptr<E> made, S& sink) {
  made->sink = &sink;
  try {
    if (!context_) throw Error(ErrorCode::kPeerLost, "the RDMA device is gone", "");
    made->connection.establish(channel_.get());
  } catch (const Error& error) {
    made->lose(error.what());  // the next poll tells it, as any other loss
  }
  return own(std::move(made));
}

ControlEndpoint* RdmaTransport::attach(std::unique_ptr<ControlEndpoint> endpoint, ControlSink& sink) {
  return establish(std::unique_ptr<RdmaControl>(static_cast<RdmaControl*>(endpoint.release())), sink);
}

DataEndpoint* RdmaTransport::attach(std::unique_ptr<DataEndpoint> endpoint, DataSink& sink) {
  return establish(std::unique_ptr<RdmaData>(static_cast<RdmaData*>(endpoint.release())), sink);
}

template <typename E, typename S>
E* RdmaTransport::accept(std::unique_ptr<IncomingConnection> incoming, S& sink) {
  const std::shared_ptr<Context> share = context();
  auto& request = static_cast<RdmaIncoming&>(*incoming);
  if (::rdma_migrate_id(request.id.get(), channel_.get()) != 0) throw_errno("cannot take over a connection");
  auto made =
      std::make_unique<E>(request.hello, state_, RcConnection(share, std::move(request.id), request.hello.plane));
  made->sink = &sink;
  made->connection.accept(request.reply);
  return own(std::move(made));
}

ControlEndpoint* RdmaTransport::accept_control(std::unique_ptr<IncomingConnection> incoming, ControlSink& sink) {
  return accept<RdmaControl>(std::move(incoming), sink);
}

DataEndpoint* RdmaTransport::accept_data(std::unique_ptr<IncomingConnection> incoming, DataSink& sink) {
  return accept<RdmaData>(std::move(incoming), sink);
}

template <typename E>
E* RdmaTransport::own(std::unique_ptr<E> endpoint) {
  E* const one = endpoint.get();
  endpoints_.add(std::move(endpoint));
  if (one->hello.path != 0 && !silence_check_) {
    silence_check_ = loop_.every(kPathCheck_s, [this] {
      if (!context_) return;
      poll();  // takes what was acknowledged while the loop slept, which woke nobody
      endpoints_.look_for_silence();
    });
  }
  return one;
}

void RdmaTransport::close(Endpoint* endpoint) {
  endpoints_.close(endpoint);
}

}  // namespace bps::transport::rdma
