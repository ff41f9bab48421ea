// SPDX-License-Identifier: Apache-2.0
#include "core/exposition.h"

#include <array>
#include <charconv>
#include <cmath>

namespace bps {
namespace {

std::string escaped(std::string_view text, bool quotes) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || (quotes && c == '"')) {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

void append(std::string& text, std::string_view name, const MetricFamily::Sample& sample) {
  text += name;
  text += sample.suffix;
  for (std::size_t i = 0; i < sample.labels.size(); ++i) {
    const auto& [label, value] = sample.labels[i];
    text += i == 0 ? '{' : ',';
    text += label;
    text += "=\"";
    text += escaped(value, true);
    text += '"';
  }
  if (!sample.labels.empty()) text += '}';
  text += ' ';
  text += to_text(sample.value);
  text += '\n';
}

void describe(std::string& text, const MetricFamily& family) {
  for (const auto& [what, of] : {std::pair<std::string_view, std::string>{"HELP", escaped(family.help, false)},
                                 {"TYPE", std::string(name_of(family.type))}}) {
    text += "# ";
    text += what;
    text += ' ';
    text += family.name;
    text += ' ';
    text += of;
    text += '\n';
  }
}

}  // namespace

std::string_view name_of(MetricFamily::Type type) {
  switch (type) {
    case MetricFamily::Type::kCounter: return "counter";
    case MetricFamily::Type::kGauge: return "gauge";
    case MetricFamily::Type::kHistogram: return "histogram";
  }
  return "untyped";
}

std::string to_text(double value) {
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  if (std::isnan(value)) return "NaN";
  std::array<char, 32> text{};
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() ? std::string(text.data(), end) : "NaN";
}

void label_all(MetricFamilies& families, const Labels& labels) {
  for (MetricFamily& family : families) {
    for (MetricFamily::Sample& sample : family.samples) {
      sample.labels.insert(sample.labels.begin(), labels.begin(), labels.end());
    }
  }
}

std::string to_text(const MetricFamilies& families) {
  std::string text;
  for (std::size_t i = 0; i < families.size(); ++i) {
    const auto same = [&](const MetricFamily& other) { return other.name == families[i].name; };
    bool described = false;
    for (std::size_t j = 0; j < i; ++j) described |= same(families[j]) && !families[j].samples.empty();
    if (described || families[i].samples.empty()) continue;
    describe(text, families[i]);
    for (std::size_t j = i; j < families.size(); ++j) {
      if (!same(families[j])) continue;
      for (const MetricFamily::Sample& sample : families[j].samples) append(text, families[j].name, sample);
    }
  }
  return text;
}

}  // namespace bps
