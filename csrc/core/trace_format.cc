// SPDX-License-Identifier: Apache-2.0
#include "core/trace_format.h"

#include <cerrno>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "core/tick_counter.h"
#include "core/trace_file.h"
#include "core/trace_json.h"
#include "core/trace_text.h"

namespace bps {
namespace {

constexpr std::size_t kBatch = 1 << 20;  // bytes of text that are written at once

class Output {
 public:
  explicit Output(NewFile& file) : file_(file) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  TraceText& text() { return text_; }
  void write_if_much() {
    if (text_.text().size() >= kBatch) write();
  }
  void write() {
    file_.write(text_.text());
    text_.clear();
  }

 private:
  NewFile& file_;
  TraceText text_;  // not yet written
};

template <codec::Plain T, typename Take>
void each(const TraceFrames& frames, const TraceFrame& frame, Take&& take) {
  if (frame.content.size() % sizeof(T) != 0) frames.refuse("it ends within an item");
  for (std::size_t at = 0; at < frame.content.size(); at += sizeof(T)) {
    T item;
    copy_bytes(frame.content.subspan(at, sizeof(T)), &item);
    if (!codec::accepts(item) || !take(item)) frames.refuse("an item has values that none has");
  }
}

template <typename T>
T decode(const TraceFrames& frames, const TraceFrame& frame) {
  auto content = codec::decode<T>(frame.content);
  if (!content) frames.refuse("its content is not of its kind");
  return std::move(*content);
}

std::string_view name_in(const TraceFrames& frames, const TraceFrame& frame) {
  if (frame.content.size() > TraceProcess::kMostText) frames.refuse("a name is too long");
  return as_text(frame.content);
}

void format(const TraceFrames& frames, const TraceFrame& frame, TraceJson& json, TickTimes& times, Output& out) {
  switch (frame.kind) {
    case TraceFrameKind::kProcess: frames.refuse("it begins a second trace");
    case TraceFrameKind::kTensorName: return json.name_tensor(frame.number, name_in(frames, frame));
    case TraceFrameKind::kNodeName: return json.name_node(frame.number, name_in(frames, frame));
    case TraceFrameKind::kSpanName: return json.name_span(frame.number, name_in(frames, frame));
    case TraceFrameKind::kDropped: return json.note_dropped(decode<TraceDropped>(frames, frame).events);
    case TraceFrameKind::kClock: return times.add(decode<TickSample>(frames, frame));
    case TraceFrameKind::kSpans:
      return each<TraceSpan>(frames, frame, [&](const TraceSpan& span) {
        out.write_if_much();
        return json.add(span);
      });
    case TraceFrameKind::kEvents:
      if (frame.number >= json.rings()) frames.refuse("it is of a loop that the process does not have");
      return each<TraceEvent>(frames, frame, [&](TraceEvent event) {
        out.write_if_much();
        event.time = times.ns(event.time);
        json.add(frame.number, event);
        return true;
      });
  }
}

}  // namespace

void format_trace(int file, const std::string& name, NewFile& json, const std::function<bool()>& gives_up) {
  TraceFrames frames(file, name);
  auto frame = frames.next();
  if (!frame || frame->kind != TraceFrameKind::kProcess) frames.refuse("it does not say whose trace this is");
  Output out(json);
  TraceJson formatter(decode<TraceProcess>(frames, *frame), out.text());
  TickTimes times;
  while ((frame = frames.next())) {
    if (gives_up()) {
      throw Error(ErrorCode::kTransport, json.path() + " was not written: the wait for it was interrupted", "");
    }
    format(frames, *frame, formatter, times, out);
  }
  formatter.end();
  out.write();
  json.replace();
}

void format_trace(const std::string& events, const std::string& json) {
  const OpenedFile opened = open_named(events);
  if (!opened.file) {
    throw Error(ErrorCode::kInvalidArgument, "cannot read " + events + ": " + std::generic_category().message(errno),
                "name a file that a traced process has written");
  }
  const FileName name = split_path(json);
  const Fd folder = open_folder(name.folder);
  NewFile out(folder.get(), name, 0666);
  format_trace(opened.file.get(), events, out, [] { return false; });
}

}  // namespace bps
