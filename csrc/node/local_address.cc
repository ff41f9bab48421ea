// SPDX-License-Identifier: Apache-2.0
#include "node/local_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>

#include "core/error.h"
#include "core/fd.h"
#include "core/words.h"

namespace bps::node {
namespace {

std::string numeric(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text{};
  const socklen_t size = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  if (::getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text.data();
}

using Interfaces = std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)>;
Interfaces list_interfaces() {
  ifaddrs* raw = nullptr;
  if (::getifaddrs(&raw) != 0) throw_errno("cannot list the network interfaces");
  return {raw, ::freeifaddrs};
}

bool has_address(const ifaddrs& one) {
  return one.ifa_addr != nullptr && (one.ifa_addr->sa_family == AF_INET || one.ifa_addr->sa_family == AF_INET6);
}

// Returns the address of an interface that is up, leads to other hosts, and is not excluded.
std::string address_of_another(const std::string& excluded) {
  const Interfaces all = list_interfaces();
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
    const bool serves = has_address(*one) && (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (serves && !excludes(excluded, one->ifa_name)) return address_of_interface(one->ifa_name);
  }
  throw Error(ErrorCode::kInvalidArgument, "no network interface is left by BPS_INTERFACE='" + excluded + "'",
              "exclude fewer, or name one; NCCL_SOCKET_IFNAME is read, too");
}

// Asks the kernel for the route by connecting a datagram socket, which sends nothing.
std::string address_of_route(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* raw = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &raw) != 0) return "127.0.0.1";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> found(raw, ::freeaddrinfo);
  const Fd socket(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage self{};
  socklen_t size = sizeof self;
  if (!socket || ::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&self), &size) != 0) {
    return "127.0.0.1";
  }
  return numeric(reinterpret_cast<const sockaddr*>(&self));
}

}  // namespace

std::string address_of_interface(const std::string& interface) {
  const Interfaces all = list_interfaces();
  std::string ipv6;
  std::string names;
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    if (one->ifa_addr->sa_family == AF_INET) names += std::string(names.empty() ? "" : ", ") + one->ifa_name;
    if (interface != one->ifa_name) continue;
    if (one->ifa_addr->sa_family == AF_INET) return numeric(one->ifa_addr);
    if (one->ifa_addr->sa_family == AF_INET6 && ipv6.empty()) ipv6 = numeric(one->ifa_addr);
  }
  if (!ipv6.empty()) return ipv6;
  throw Error(ErrorCode::kInvalidArgument, "no network interface '" + interface + "' with an address",
              "set BPS_INTERFACE to one of: " + names);
}

std::vector<std::string> interface_names(const std::string& list) {
  std::vector<std::string> all;
  if (!list.empty()) {
    const Interfaces found = list_interfaces();
    for (const ifaddrs* one = found.get(); one != nullptr; one = one->ifa_next) {
      if (has_address(*one) && std::ranges::find(all, one->ifa_name) == all.end()) all.emplace_back(one->ifa_name);
    }
  }
  return interface_names(list, all);
}

std::vector<std::string> interface_names(const std::string& list, const std::vector<std::string>& all) {
  std::vector<std::string> names;
  if (list.starts_with('^')) return names;
  const bool exact = list.starts_with('=');
  for_each_word(std::string_view(list).substr(exact ? 1 : 0), ',', [&](std::string_view word) {
    const std::size_t before = names.size();
    if (!exact && std::ranges::find(all, word) == all.end()) {
      for (const std::string& name : all) {
        if (name.starts_with(word) && std::ranges::find(names, name) == names.end()) names.push_back(name);
      }
    }
    if (names.size() == before) names.emplace_back(word);
  });
  return names;
}

bool excludes(const std::string& list, const std::string& interface) {
  if (!list.starts_with('^')) return false;
  const bool exact = list.starts_with("^=");
  bool excluded = false;
  for_each_word(std::string_view(list).substr(exact ? 2 : 1), ',',
                [&](std::string_view word) { excluded |= exact ? interface == word : interface.starts_with(word); });
  return excluded;
}

std::string interface_with(const std::string& address) {
  const Interfaces all = list_interfaces();
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
    if (has_address(*one) && numeric(one->ifa_addr) == address) return one->ifa_name;
  }
  return "";
}

std::string local_address(const std::string& wanted, const std::string& interfaces, const std::string& scheduler_host) {
  if (!wanted.empty()) return wanted;
  const std::vector<std::string> names = interface_names(interfaces);
  if (!names.empty()) return address_of_interface(names.front());
  std::string address = address_of_route(scheduler_host);
  // A name of this host may lead to its loopback address here, and to another one elsewhere.
  if (is_loopback(address) && !is_loopback(scheduler_host)) address = address_for_others("");
  if (excludes(interfaces, interface_with(address))) return address_of_another(interfaces);
  return address;
}

std::string address_for_others(const std::string& host) {
  // The last two are set aside for documentation: no host has them, so the route to them is the one to everywhere.
  for (const std::string& towards : {numeric_address(host), std::string("192.0.2.1"), std::string("2001:db8::1")}) {
    if (towards.empty()) continue;
    const std::string address = address_of_route(towards);
    if (!is_loopback(address)) return address;
  }
  for (const char* excluded : {"^docker,br-,veth,virbr,cni,flannel,lxc", "^"}) {  // there is no such route
    try {
      return address_of_another(excluded);
    } catch (const Error&) {  // no interface is left
    }
  }
  return "127.0.0.1";
}

std::string name_for_others(const std::string& host) {
  const std::string address = numeric_address(host);
  const bool is_ours = !address.empty() && !is_loopback(address) && address_of_route(address) == address;
  return is_ours ? host : address_for_others(host);
}

std::string numeric_address(const std::string& host) {
  addrinfo* raw = nullptr;
  if (host.empty() || ::getaddrinfo(host.c_str(), nullptr, nullptr, &raw) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> found(raw, ::freeaddrinfo);
  return numeric(found->ai_addr);
}

bool is_loopback(const std::string& host) {
  in_addr ipv4{};
  in6_addr ipv6{};
  if (::inet_pton(AF_INET, host.c_str(), &ipv4) == 1) return ntohl(ipv4.s_addr) >> 24 == IN_LOOPBACKNET;
  if (::inet_pton(AF_INET6, host.c_str(), &ipv6) == 1) return IN6_IS_ADDR_LOOPBACK(&ipv6);
  return host == "localhost";
}

bool is_of_this_host(const std::string& host) {
  const std::string address = numeric_address(host);
  if (address == "0.0.0.0" || address == "::") return true;  // programs listen there at all addresses
  // The kernel routes to an address of this host from that address.
  return is_loopback(address) || (!address.empty() && address_of_route(address) == address);
}

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

unsigned long long pid_namespace() {
  struct stat found{};
  return ::stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

}  // namespace bps::node
