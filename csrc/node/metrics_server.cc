// SPDX-License-Identifier: Apache-2.0
#include "node/metrics_server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "core/threads.h"
#include "node/system_metrics.h"
#include "transport/listener.h"

namespace bps::node {
namespace {

constexpr int kAcceptsPerTurn = 16;
constexpr std::string_view kText = "text/plain; version=0.0.4; charset=utf-8";

std::string response(std::string_view status, std::string_view type, std::string_view body, bool with_body = true) {
  std::string text = "HTTP/1.1 ";
  text += status;
  text += "\r\nContent-Type: ";
  text += type;
  text += "\r\nContent-Length: ";
  text += std::to_string(body.size());
  text += "\r\nConnection: close\r\n\r\n";
  if (with_body) text += body;
  return text;
}

}  // namespace

MetricsServer::MetricsServer(const std::string& address, std::uint16_t port, std::function<std::string()> text)
    : text_(std::move(text)), listener_(transport::Listener::listen_tcp(address, port)) {
  ::fcntl(listener_.get(), F_SETFL, ::fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  loop_.watch(listener_.get(), EPOLLIN, [this](std::uint32_t) { accept_some(); });
  thread_ = start_thread([this] { run(); });
}

MetricsServer::~MetricsServer() {
  stopping_ = true;
  loop_.wake();
  thread_.join();
}

void MetricsServer::run() {
  name_thread("bps-metrics");
  while (!stopping_) {
    try {
      loop_.turn(std::chrono::hours(1));
    } catch (const std::exception& error) {  // it is of one connection: the next may do better
      log_warning(std::string("metrics were not served: ") + error.what());
    }
  }
}

void MetricsServer::accept_some() {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // The listener stays ready while there are no descriptors, so the oldest connection makes room.
      if ((errno == EMFILE || errno == ENFILE) && !connections_.empty()) close(connections_.begin());
      return;
    }
    if (connections_.size() == kMostConnections) close(connections_.begin());
    const auto made = connections_.insert(connections_.end(), Connection{.socket = std::move(socket)});
    made->expiry = loop_.after(kPatience_s, [this, made] { close(made); });
    loop_.watch(made->socket.get(), EPOLLIN, [this, made](std::uint32_t) { advance(made); });
  }
}

void MetricsServer::advance(Connections::iterator connection) {
  bool goes_on = false;
  try {
    goes_on = connection->answers ? send(*connection) : receive(*connection);
  } catch (...) {
    close(connection);
    throw;
  }
  if (!goes_on) close(connection);
}

bool MetricsServer::receive(Connection& connection) {
  char buffer[1024];
  const ssize_t got = ::read(connection.socket.get(), buffer, sizeof buffer);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  connection.request.append(buffer, static_cast<std::size_t>(got));
  if (connection.request.find("\r\n\r\n") == std::string::npos && connection.request.size() <= kMostRequest)
    return true;
  connection.answer = answer_to(connection.request);
  connection.answers = true;
  loop_.change(connection.socket.get(), EPOLLOUT);
  return send(connection);
}

bool MetricsServer::send(Connection& connection) {
  const ssize_t sent =
      ::send(connection.socket.get(), connection.answer.data(), connection.answer.size(), MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN || errno == EINTR;
  connection.answer.erase(0, static_cast<std::size_t>(sent));
  return !connection.answer.empty();
}

std::string MetricsServer::answer_to(const std::string& request) const {
  if (request.size() > kMostRequest) return response("431 Request Header Fields Too Large", kText, "");
  const std::string_view line = std::string_view(request).substr(0, request.find("\r\n"));
  const std::size_t space = line.find(' ');
  const std::string_view method = line.substr(0, space);
  if (space == std::string_view::npos) return response("400 Bad Request", kText, "");
  if (method != "GET" && method != "HEAD") return response("405 Method Not Allowed", kText, "only GET\n");
  std::string_view path = line.substr(space + 1);
  path = path.substr(0, path.find_first_of(" ?"));
  if (path != "/metrics") return response("404 Not Found", kText, "the metrics are at /metrics\n", method == "GET");
  return response("200 OK", kText, text_(), method == "GET");
}

void MetricsServer::close(Connections::iterator connection) {
  loop_.forget(connection->socket.get());
  connections_.erase(connection);
}

std::unique_ptr<MetricsServer> serve(const MetricsSettings& settings, std::uint32_t offset,
                                     std::function<MetricFamilies()> families) {
  if (!settings.port) return nullptr;
  const std::uint32_t port = *settings.port + offset;
  const auto text = [families = std::move(families)] {
    MetricFamilies all = families();
    std::ranges::move(process_families(), std::back_inserter(all));
    return to_text(all);
  };
  try {
    if (port > std::numeric_limits<std::uint16_t>::max()) {
      throw Error(ErrorCode::kInvalidArgument, "there is no port " + std::to_string(port),
                  "set BPS_METRICS_PORT lower");
    }
    const std::string host = settings.host == "*" ? "" : settings.host;
    auto server = std::make_unique<MetricsServer>(host, static_cast<std::uint16_t>(port), text);
    log_info("metrics are served at port " + std::to_string(port));
    return server;
  } catch (const Error& error) {
    log_warning(std::string("no metrics are served: ") + error.what() + " (" + error.hint() + ")");
  }
  return nullptr;
}

}  // namespace bps::node
