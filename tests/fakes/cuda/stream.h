// Streams of the fake devices: each is a thread that runs its work first in, first out.
//
// Whoever enqueues orders the work after what it did before; the thread gives nothing back except through moments. No
// lock is shared between a stream's thread and anybody else, so a missing wait is a data race that ThreadSanitizer
// sees.
#ifndef RINGTRAIN_TESTS_FAKES_CUDA_STREAM_H_
#define RINGTRAIN_TESTS_FAKES_CUDA_STREAM_H_

#include <functional>

#include "cuda/moment.h"

namespace fakes {

struct Stream;  // never freed, so that the use of a destroyed one is seen

constexpr int kMaxDevices = 16;

// A stream of one device. A blocking one is ordered with the device's legacy stream, as CUDA does.
Stream* NewStream(int device, bool blocking);
// The streams behind the handles 0 and 1, and behind 2.
Stream* LegacyStream(int device);
Stream* ThreadStream(int device);
// Lets it finish what it has; no further use.
void DestroyStream(Stream* stream);

bool IsStream(const void* handle);  // and was not destroyed
int DeviceOf(const Stream* stream);
bool IsCapturing(const Stream* stream);
void SetCapturing(Stream* stream, bool capturing);

void Launch(Stream* stream, std::function<void()> work);
// The point after all that was launched so far.
Moment* Record(Stream* stream);
// Work launched later waits for the moment.
void WaitFor(Stream* stream, Moment* moment);
// The calling thread waits for everything on a device.
void Synchronize(int device);
long LiveStreams();

}  // namespace fakes
#endif  // RINGTRAIN_TESTS_FAKES_CUDA_STREAM_H_
