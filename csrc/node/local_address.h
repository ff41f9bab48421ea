// SPDX-License-Identifier: Apache-2.0
// Chooses the address of this host that its peers should use.
#pragma once

#include <string>
#include <vector>

namespace bps::node {

// `wanted` if given; else the first address of the first of `interfaces`; else the source address of the route to the
// scheduler, or, where `interfaces` excludes that, of the first interface that it leaves. Throws kInvalidArgument when
// there is none, or it has no address.
std::string local_address(const std::string& wanted, const std::string& interfaces, const std::string& scheduler_host);

// Throws kInvalidArgument when it does not exist or has no address.
std::string address_of_interface(const std::string& interface);
// Reads a list of interfaces as NCCL reads NCCL_SOCKET_IFNAME: names, or beginnings of names, with commas; '=' in
// front: names only; '^' in front: all but these, which names none. A word that is no beginning is kept as it is.
std::vector<std::string> interface_names(const std::string& list);
std::vector<std::string> interface_names(const std::string& list, const std::vector<std::string>& all);
// True when a list with '^' in front leaves out this interface.
bool excludes(const std::string& list, const std::string& interface);
// The interface that has this numeric address, or "".
std::string interface_with(const std::string& address);

// An address of this host that others can use: that of the route to `host`, and if this leads nowhere, or is a loopback
// address, that of the route to everywhere, or of an interface. A loopback address if this host has no other.
std::string address_for_others(const std::string& host);
// The same of a name or address that is to lead others here: itself, unless it is another host's or a loopback address.
std::string name_for_others(const std::string& host);

// A name or an address as a numeric address; "" when it cannot be resolved.
std::string numeric_address(const std::string& host);

// 127.0.0.0/8, ::1, or "localhost", which no other host can mean. A name does not count, wherever it leads: many hosts
// map their own to a loopback address.
bool is_loopback(const std::string& host);
// True when this name or address leads back to this host.
bool is_of_this_host(const std::string& host);

std::string host_name();
// Process ids are unique within it only. Containers with namespaces of their own may share the host's name, the names
// of local sockets, and folders. 0 where the kernel does not tell.
unsigned long long pid_namespace();

}  // namespace bps::node
