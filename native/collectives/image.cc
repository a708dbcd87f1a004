#include "collectives/image.h"

#include <algorithm>

#include "base/clock.h"

namespace ringtrain {
namespace {

// Counts the time of a scope as the codec's. The identity takes none.
class CodecTime {
 public:
  CodecTime(const Codec& codec, Counters* counters)
      : counters_(codec.identity() ? nullptr : counters), started_(counters_ == nullptr ? 0 : Now()) {}
  CodecTime(const CodecTime&) = delete;
  CodecTime& operator=(const CodecTime&) = delete;
  ~CodecTime() {
    if (counters_ != nullptr) counters_->Add(Counter::kCodecNanoseconds, Now() - started_);
  }

 private:
  Counters* const counters_;
  const Nanoseconds started_;
};

}  // namespace

void Image::Take(char* slot, const Chunk& chunk, int ring, int hosts) {
  parts_.clear();
  runs_.clear();
  encoded_bytes_ = 0;
  for (int host = 0; host < hosts; ++host) {
    const Cell& cell = chunk.cells[ring * hosts + host];
    const size_t offset = encoded_bytes_;
    const int first = static_cast<int>(runs_.size());
    char* elements = slot + cell.result_offset;
    if (codec_.form().block == 1 && !codec_.form().feedback && cell.bytes > 0) {
      AddRun(elements, chunk.segments[cell.first], cell.bytes);  // no matter whose elements they are
    } else {
      for (int s = cell.first; s < cell.end; elements += chunk.segments[s++].bytes)
        AddRun(elements, chunk.segments[s], chunk.segments[s].bytes);
    }
    parts_.push_back({offset, encoded_bytes_ - offset, first, static_cast<int>(runs_.size())});
  }
  data_ = slot;
  if (codec_.identity()) return;
  encoded_.resize(std::max(encoded_.size(), encoded_bytes_));
  data_ = encoded_.data();
  const CodecTime time(codec_, counters_);
  for (const Run& run : runs_) codec_.Encode(batch_.dtype, data_ + run.offset, run.elements, run.count, Sent(run));
}

Feedback Image::Sent(const Run& run) const {
  return run.residual == nullptr ? Feedback() : run.residual->Sent(run.first, run.count);
}

Feedback Image::Finished(const Run& run) const {
  return run.residual == nullptr ? Feedback() : run.residual->Finished(run.first, run.count);
}

void Image::AddRun(char* elements, const Segment& segment, size_t bytes) {
  const size_t element = Bytes(batch_.dtype), count = bytes / element;
  const BatchTensor& tensor = batch_.tensors[segment.tensor];
  Run run = {elements, count, encoded_bytes_, nullptr, 0};
  if (codec_.form().feedback) {
    run.residual = tensor.residual;
    run.first = tensor.residual_offset + segment.input_offset / element;
  }
  encoded_bytes_ += codec_.WireBytes(batch_.dtype, count);
  runs_.push_back(run);
}

void Image::Reduce(int host, char* to, const void* const* sources, int source_count, const Scaling& scaling) {
  const Part& part = parts_[host];
  sources_.resize(source_count);
  const CodecTime time(codec_, counters_);
  for (int r = part.first; r < part.end; ++r) {
    const Run& run = runs_[r];
    for (int source = 0; source < source_count; ++source)
      sources_[source] = static_cast<const char*>(sources[source]) + (run.offset - part.offset);
    codec_.Reduce(batch_.dtype, batch_.reduction, to + (run.offset - part.offset), sources_.data(), source_count,
                  run.count, scaling, Finished(run));
  }
}

void Image::Decode(int host) const {
  if (codec_.identity()) return;
  const CodecTime time(codec_, counters_);
  for (int r = parts_[host].first; r < parts_[host].end; ++r)
    codec_.Decode(batch_.dtype, runs_[r].elements, data_ + runs_[r].offset, runs_[r].count, batch_.scaling.postscale);
}

}  // namespace ringtrain
