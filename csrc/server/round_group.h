// SPDX-License-Identifier: Apache-2.0
// A group as a server loop sees it: who contributes to its rounds.
#pragma once

#include "van/hosts.h"

namespace bps::server {

// The host and the server of this loop.
struct Location {
  std::uint32_t host = van::Hosts::kNoHost;
  std::uint32_t server_rank = 0;  // if it is one
};

struct RoundGroup {
  RoundGroup(const van::Group& members, const van::Hosts& hosts, const Location& here)
      : group(members), network(van::Contributors::by_host(members, hosts)) {
    if (!hosts.active() || here.host == van::Hosts::kNoHost) return;
    host = van::Contributors::on_host(members, hosts, here.host);
    ends_on_host = host.size() == members.size();
    if (host.size() > 0) host_contributor = network.of_position(host[0].positions.front());
  }

  const van::Contributors& contributors(bool for_host) const { return for_host ? host : network; }

  van::Group group;
  van::Contributors network;           // to rounds that are summed here for all
  van::Contributors host;              // to rounds that are summed here for this host
  bool ends_on_host = false;           // those are all there is: nobody else is in the group
  std::uint32_t host_contributor = 0;  // what this host is in `network`
};

}  // namespace bps::server
