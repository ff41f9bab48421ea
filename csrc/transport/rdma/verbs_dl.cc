// SPDX-License-Identifier: Apache-2.0
// Defines the functions of libibverbs and librdmacm that we use. Each forwards to the library opened at run time.
//
// The headers' hot functions (ibv_post_send, ibv_poll_cq, ...) are inline and go through the device's own table: they
// need nothing from here. Newer functions may be missing in an older library, and are then answered with ENOSYS.
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>

#include "transport/rdma/libraries.h"

// These macros of the headers stand for the functions of the same names.
#undef ibv_reg_mr
#undef ibv_query_port

namespace bps::transport::rdma {
namespace {

struct Handles {
  void* verbs = nullptr;
  void* cm = nullptr;
  RdmaLibraries libraries;
};

std::string file_of(void* library, const char* function) {
  Dl_info info{};
  if (::dladdr(::dlsym(library, function), &info) == 0) return "";
  std::array<char, PATH_MAX> real{};
  const std::string path = ::realpath(info.dli_fname, real.data()) != nullptr ? real.data() : info.dli_fname;
  return path.substr(path.rfind('/') + 1);
}

// Must be called before the first registration. On kernels before 5.12 a fork would part the process from the pages
// that its device uses. There, children do not get registered pages at all, nor what else lies in them. On other
// kernels this changes nothing: a child that touched such a page would be killed.
void protect_in_forks(void* verbs) {
  constexpr int kUnneeded = 2;  // IBV_FORK_UNNEEDED; an older library cannot tell
  auto* protect = reinterpret_cast<int (*)()>(::dlsym(verbs, "ibv_fork_init"));
  auto* status = reinterpret_cast<int (*)()>(::dlsym(verbs, "ibv_is_fork_initialized"));
  if (protect != nullptr && (status == nullptr || status() != kUnneeded)) protect();
}

Handles open_libraries(const char* verbs) {
  Handles handles;
  // These are the names of the ABI versions; the names without a number come with the development files only.
  handles.verbs = ::dlopen(verbs, RTLD_NOW | RTLD_LOCAL);
  handles.cm = handles.verbs == nullptr ? nullptr : ::dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL);
  RdmaLibraries& found = handles.libraries;
  if (handles.cm == nullptr) {
    const char* error = ::dlerror();
    found.why_not = error != nullptr ? error : "the verbs libraries cannot be opened";
    found.hint = "install libibverbs1, librdmacm1 and ibverbs-providers (rdma-core elsewhere)";
    return handles;
  }
  found.verbs = file_of(handles.verbs, "ibv_get_device_list");
  found.cm = file_of(handles.cm, "rdma_create_id");
  if (::dlsym(handles.verbs, "_ibv_query_gid_table") == nullptr || ::dlsym(handles.cm, "rdma_establish") == nullptr) {
    found.why_not = found.verbs + " is too old";
    found.hint = "install rdma-core 32 or newer";
    return handles;
  }
  protect_in_forks(handles.verbs);
  found.ready = true;
  return handles;
}

const Handles& handles(const char* verbs = kVerbsLibrary) {
  static const Handles opened = open_libraries(verbs);
  return opened;
}

// Returns the real function, or null.
template <typename F>
F* real(void* library, const char* name) {
  return library == nullptr ? nullptr : reinterpret_cast<F*>(::dlsym(library, name));
}

}  // namespace

const RdmaLibraries& rdma_libraries(const char* verbs) {
  return handles(verbs).libraries;
}

}  // namespace bps::transport::rdma

// `failure` is what the function returns when it is missing; errno is set in any case.
#define BPS_FORWARD(library, failure, result, name, parameters, arguments)                             \
  extern "C" result name parameters {                                                                  \
    static const auto forward =                                                                        \
        bps::transport::rdma::real<result parameters>(bps::transport::rdma::handles().library, #name); \
    if (forward != nullptr) return forward arguments;                                                  \
    errno = ENOSYS;                                                                                    \
    return failure;                                                                                    \
  }
#define BPS_VERBS(failure, result, name, parameters, arguments) \
  BPS_FORWARD(verbs, failure, result, name, parameters, arguments)
#define BPS_CM(result, name, parameters, arguments) BPS_FORWARD(cm, result(-1), result, name, parameters, arguments)

// Devices
BPS_VERBS(nullptr, ibv_device**, ibv_get_device_list, (int* count), (count))
BPS_VERBS(void(), void, ibv_free_device_list, (ibv_device * *list), (list))
BPS_VERBS(nullptr, ibv_context*, ibv_open_device, (ibv_device * device), (device))
BPS_VERBS(ENOSYS, int, ibv_close_device, (ibv_context * device), (device))
BPS_VERBS(ENOSYS, int, ibv_query_device, (ibv_context * device, ibv_device_attr* attributes), (device, attributes))
BPS_VERBS(ENOSYS, int, ibv_query_port, (ibv_context * device, uint8_t port, _compat_ibv_port_attr* attributes),
          (device, port, attributes))
BPS_VERBS(-ENOSYS, ssize_t, _ibv_query_gid_table,
          (ibv_context * device, ibv_gid_entry* entries, size_t most, uint32_t flags, size_t entry_size),
          (device, entries, most, flags, entry_size))
BPS_VERBS(-1, int, ibv_get_async_event, (ibv_context * device, ibv_async_event* event), (device, event))
BPS_VERBS(void(), void, ibv_ack_async_event, (ibv_async_event * event), (event))

// Objects
BPS_VERBS(nullptr, ibv_pd*, ibv_alloc_pd, (ibv_context * device), (device))
BPS_VERBS(ENOSYS, int, ibv_dealloc_pd, (ibv_pd * pd), (pd))
BPS_VERBS(nullptr, ibv_mr*, ibv_reg_mr, (ibv_pd * pd, void* address, size_t length, int access),
          (pd, address, length, access))
BPS_VERBS(nullptr, ibv_mr*, ibv_reg_mr_iova2,
          (ibv_pd * pd, void* address, size_t length, uint64_t iova, unsigned int access),
          (pd, address, length, iova, access))
BPS_VERBS(nullptr, ibv_mr*, ibv_reg_dmabuf_mr,
          (ibv_pd * pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access),
          (pd, offset, length, iova, fd, access))
BPS_VERBS(ENOSYS, int, ibv_dereg_mr, (ibv_mr * region), (region))
BPS_VERBS(nullptr, ibv_comp_channel*, ibv_create_comp_channel, (ibv_context * device), (device))
BPS_VERBS(ENOSYS, int, ibv_destroy_comp_channel, (ibv_comp_channel * channel), (channel))
BPS_VERBS(nullptr, ibv_cq*, ibv_create_cq,
          (ibv_context * device, int entries, void* user, ibv_comp_channel* channel, int vector),
          (device, entries, user, channel, vector))
BPS_VERBS(ENOSYS, int, ibv_resize_cq, (ibv_cq * cq, int entries), (cq, entries))
BPS_VERBS(ENOSYS, int, ibv_destroy_cq, (ibv_cq * cq), (cq))
BPS_VERBS(-1, int, ibv_get_cq_event, (ibv_comp_channel * channel, ibv_cq** cq, void** user), (channel, cq, user))
BPS_VERBS(void(), void, ibv_ack_cq_events, (ibv_cq * cq, unsigned int count), (cq, count))
BPS_VERBS(nullptr, ibv_srq*, ibv_create_srq, (ibv_pd * pd, ibv_srq_init_attr* attributes), (pd, attributes))
BPS_VERBS(ENOSYS, int, ibv_modify_srq, (ibv_srq * srq, ibv_srq_attr* attributes, int mask), (srq, attributes, mask))
BPS_VERBS(ENOSYS, int, ibv_destroy_srq, (ibv_srq * srq), (srq))
BPS_VERBS(nullptr, ibv_qp*, ibv_create_qp, (ibv_pd * pd, ibv_qp_init_attr* attributes), (pd, attributes))
BPS_VERBS(ENOSYS, int, ibv_modify_qp, (ibv_qp * qp, ibv_qp_attr* attributes, int mask), (qp, attributes, mask))
BPS_VERBS(ENOSYS, int, ibv_destroy_qp, (ibv_qp * qp), (qp))

// Words
BPS_VERBS("unknown status", const char*, ibv_wc_status_str, (ibv_wc_status status), (status))
BPS_VERBS("unknown event", const char*, ibv_event_type_str, (ibv_event_type event), (event))
BPS_VERBS("unknown state", const char*, ibv_port_state_str, (ibv_port_state state), (state))

// The connection manager
BPS_FORWARD(cm, nullptr, rdma_event_channel*, rdma_create_event_channel, (), ())
BPS_FORWARD(cm, void(), void, rdma_destroy_event_channel, (rdma_event_channel * channel), (channel))
BPS_CM(int, rdma_create_id, (rdma_event_channel * channel, rdma_cm_id** id, void* device, rdma_port_space space),
       (channel, id, device, space))
BPS_CM(int, rdma_destroy_id, (rdma_cm_id * id), (id))
BPS_CM(int, rdma_bind_addr, (rdma_cm_id * id, sockaddr* address), (id, address))
BPS_CM(int, rdma_resolve_addr, (rdma_cm_id * id, sockaddr* from, sockaddr* to, int timeout), (id, from, to, timeout))
BPS_CM(int, rdma_resolve_route, (rdma_cm_id * id, int timeout), (id, timeout))
BPS_CM(int, rdma_connect, (rdma_cm_id * id, rdma_conn_param* parameters), (id, parameters))
BPS_CM(int, rdma_establish, (rdma_cm_id * id), (id))
BPS_CM(int, rdma_listen, (rdma_cm_id * id, int backlog), (id, backlog))
BPS_CM(int, rdma_accept, (rdma_cm_id * id, rdma_conn_param* parameters), (id, parameters))
BPS_CM(int, rdma_reject, (rdma_cm_id * id, const void* data, uint8_t size), (id, data, size))
BPS_CM(int, rdma_notify, (rdma_cm_id * id, ibv_event_type event), (id, event))
BPS_CM(int, rdma_get_cm_event, (rdma_event_channel * channel, rdma_cm_event** event), (channel, event))
BPS_CM(int, rdma_ack_cm_event, (rdma_cm_event * event), (event))
BPS_FORWARD(cm, "unknown event", const char*, rdma_event_str, (rdma_cm_event_type event), (event))
BPS_FORWARD(cm, 0, __be16, rdma_get_src_port, (rdma_cm_id * id), (id))
BPS_CM(int, rdma_set_option, (rdma_cm_id * id, int level, int name, void* value, size_t size),
       (id, level, name, value, size))
BPS_CM(int, rdma_migrate_id, (rdma_cm_id * id, rdma_event_channel* channel), (id, channel))
BPS_CM(int, rdma_init_qp_attr, (rdma_cm_id * id, ibv_qp_attr* attributes, int* mask), (id, attributes, mask))
