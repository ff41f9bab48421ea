// libFuzzer: the records of shared-memory endpoints. An accepted range never leaves its file or the address space.
#include "fuzz/fuzz.h"
#include "transport/shm/record.h"

using namespace bps;
using transport::shm::ShmRecord;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  fuzz::round_trip<ShmRecord>(bytes);
  const auto record = codec::decode_front<ShmRecord>(bytes);
  if (!record) return 0;
  std::uint64_t end = 0;
  fuzz::expect(!__builtin_add_overflow(record->base, record->size, &end));
  if (record->kind == ShmRecord::kMapped) fuzz::expect(end <= record->file_size);
  fuzz::expect(record->reaches_plain <= 1);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  static const auto samples = [] {
    std::vector<Bytes> all;
    for (const auto kind : {ShmRecord::kSetup, ShmRecord::kReply, ShmRecord::kMapped, ShmRecord::kPlain}) {
      ShmRecord record{};
      record.kind = kind;
      record.size = 4096;
      if (kind == ShmRecord::kMapped) record.file_size = 8192;
      const auto bytes = codec::encode(record);
      all.emplace_back(bytes.begin(), bytes.end());
    }
    return all;
  }();
  return fuzz::mutate_from(samples, data, size, most, seed);
}
