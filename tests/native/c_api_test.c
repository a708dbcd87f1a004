/* The C ABI from C: every function of ringtrain.h once, in two ranks of this process. The rest of the tests go through it from
 * Python, or stand below it. Prints what failed; the exit code is 0 if nothing did. */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/ringtrain.h"

static int failures = 0;
static pthread_mutex_t failures_mutex = PTHREAD_MUTEX_INITIALIZER;

static int Check(int condition, const char *text, int line) {
  if (condition) return 1;
  pthread_mutex_lock(&failures_mutex);
  ++failures;
  fprintf(stderr, "c_api_test.c:%d: %s\n", line, text);
  pthread_mutex_unlock(&failures_mutex);
  return 0;
}
#define CHECK(condition) Check((condition), #condition, __LINE__)

enum { kOk = 0, kPending = 1, kInvalidArgument = 2, kPeerLost = 6, kClosed = 7 };
enum { kAllreduce = 0, kAllgather = 1, kAlltoall = 3, kBarrier = 5, kJoin = 6, kAddProcessSet = 7, kRemoveProcessSet = 8 };
enum { kFloat32 = 7, kSum = 1 };

static rt_request Request(const char *name, int operation, const rt_tensor *tensor) {
  rt_request request;
  memset(&request, 0, sizeof request);
  request.name = name;
  request.operation = operation;
  request.reduction = kSum;
  request.root = -1;
  request.prescale = request.postscale = 1;
  request.tensor_count = tensor == NULL ? 0 : 1;
  request.tensors = tensor;
  request.caller_waits = 1;
  request.cacheable = 1;
  return request;
}

static rt_tensor Floats(const float *data, float *output, const int64_t *shape) {
  rt_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.output = output;
  tensor.dtype = kFloat32;
  tensor.device = -1;
  tensor.ndim = 1;
  tensor.shape = shape;
  return tensor;
}

/* Submits and waits; the handle is the caller's. */
static rt_handle *Finished(rt_context *context, const rt_request *request) {
  rt_handle *handle = NULL;
  char *error = NULL;
  if (!CHECK(rt_submit(context, request, &handle, &error) == kOk)) {
    fprintf(stderr, "%s\n", error);
    exit(1);
  }
  CHECK(rt_wait(handle, 100, &error) == kOk);
  CHECK(rt_poll(handle) == kOk);
  return handle;
}

static void *Allocate(void *memory, int32_t tensor, int32_t ndim, const int64_t *shape) {
  CHECK(tensor == 0 && ndim == 1 && shape[0] == 4);
  return memory;
}

static void Done(void *memory, int32_t status, const char *error) {
  CHECK(status == kOk && error == NULL);
  ((float *)memory)[7] = 1;
}

static void Operations(rt_context *context, int rank) {
  const int64_t two = 2;
  float values[2] = {1.0f + (float)rank, 10}, sums[2] = {0, 0};
  rt_tensor tensor = Floats(values, sums, &two);
  rt_request request = Request("sum", kAllreduce, &tensor);
  rt_handle_free(Finished(context, &request));
  CHECK(sums[0] == 3 && sums[1] == 20);

  tensor = Floats(values, NULL, &two);
  request = Request("gather", kAllgather, &tensor);
  rt_handle *handle = Finished(context, &request);
  void *data;
  int32_t ndim;
  int64_t shape[64];
  CHECK(rt_output(handle, 0, &data, &ndim, shape, NULL) == kOk);
  CHECK(ndim == 1 && shape[0] == 4 && ((float *)data)[2] == 2);
  char *error = NULL;
  CHECK(rt_output(handle, 1, &data, &ndim, shape, &error) == kInvalidArgument && error != NULL);
  rt_free(error);
  float *taken = rt_take_output(handle, 0);
  CHECK(taken != NULL && rt_take_output(handle, 0) == NULL && rt_take_output(handle, 5) == NULL);
  rt_handle_free(handle);
  CHECK(taken[0] == 1 && taken[2] == 2);
  rt_free(taken);

  float memory[8] = {0};
  request.name = "gather into the caller's memory";
  request.allocate = Allocate;
  request.done = Done;
  request.callback_context = memory;
  rt_handle_free(Finished(context, &request));
  CHECK(memory[2] == 2 && memory[7] == 1);

  const int64_t splits[2] = {rank, 2 - rank};
  request = Request("exchange", kAlltoall, &tensor);
  request.split_count = 2;
  request.splits = splits;
  handle = Finished(context, &request);
  int64_t received[2] = {-1, -1};
  CHECK(rt_received_splits(handle, received, 2) == 2);
  CHECK(received[0] == (rank == 0 ? 0 : 2) && received[1] == 1);
  rt_handle_free(handle);

  request = Request("wait for all", kBarrier, NULL);
  rt_handle_free(Finished(context, &request));
  request = Request("join", kJoin, NULL);
  handle = Finished(context, &request);
  CHECK(rt_result(handle) == 0 || rt_result(handle) == 1);
  rt_handle_free(handle);
}

static void ProcessSets(rt_context *context) {
  const int64_t ranks[2] = {0, 1};
  rt_request request = Request("add", kAddProcessSet, NULL);
  request.split_count = 2;
  request.splits = ranks;
  rt_handle *handle = Finished(context, &request);
  const int64_t id = rt_result(handle);
  rt_handle_free(handle);
  int32_t members[2] = {-1, -1};
  CHECK(rt_process_set_ranks(context, (int32_t)id, members, 2) == 2 && members[1] == 1);
  CHECK(rt_process_set_ranks(context, 77, members, 2) == -1);
  request = Request("remove", kRemoveProcessSet, NULL);
  request.split_count = 1;
  request.splits = &id;
  rt_handle_free(Finished(context, &request));
  CHECK(rt_process_set_ranks(context, (int32_t)id, members, 2) == -1);
}

/* An object as other languages have them, for whose fields there is a layout. */
struct Object {
  int32_t flags, ndim;
  const void *kind;
  const int64_t *shape;
  float *data;
};

static void Descriptions(rt_context *context, int rank) {
  static const char kind_of_floats, another_kind;
  rt_layout layout;
  memset(&layout, 0, sizeof layout);
  layout.data = offsetof(struct Object, data);
  layout.ndim = offsetof(struct Object, ndim);
  layout.shape = offsetof(struct Object, shape);
  layout.dtype = offsetof(struct Object, kind);
  layout.flags = offsetof(struct Object, flags);
  layout.needs = 5;
  layout.dtypes[kFloat32] = (uintptr_t)&kind_of_floats;
  const int64_t extents[2] = {1, 2};
  float values[2][2] = {{1.0f + (float)rank, 10}, {3, 4}}, sums[2][2];
  struct Object inputs[2], outputs[2];
  uintptr_t from[2], to[2];
  for (int i = 0; i < 2; ++i) {
    inputs[i] = outputs[i] = (struct Object){7, 2, &kind_of_floats, extents, values[i]};
    outputs[i].data = sums[i];
    from[i] = (uintptr_t)&inputs[i];
    to[i] = (uintptr_t)&outputs[i];
  }
  rt_tensor tensors[2];
  CHECK(rt_describe(&layout, from, to, 2, tensors) == 2);
  rt_request request = Request("described", kAllreduce, tensors);
  request.tensor_count = 2;
  rt_handle_free(Finished(context, &request));
  CHECK(sums[0][0] == 3 && sums[0][1] == 20 && sums[1][0] == 6 && sums[1][1] == 8);

  const void *const data[2] = {sums[1], sums[0]};
  void *const places[2] = {values[0], values[1]};
  rt_place(tensors, 2, data, places);
  rt_handle_free(Finished(context, &request));
  CHECK(values[0][0] == 12 && values[0][1] == 16 && values[1][0] == 6 && values[1][1] == 40);

  inputs[1].flags = 3; /* lacks one of those that are needed */
  CHECK(rt_describe(&layout, from, to, 2, tensors) == 1);
  inputs[1].flags = 5;
  inputs[0].kind = &another_kind;
  CHECK(rt_describe(&layout, from, to, 2, tensors) == 0);
  inputs[0].kind = NULL; /* what the rows have that no object is of */
  CHECK(rt_describe(&layout, from, to, 2, tensors) == 0);
}

static void Refusals(rt_context *context, int rank) {
  const int64_t one = 1;
  float value = 1;
  rt_tensor tensor = Floats(&value, &value, &one);
  rt_request request = Request("refused", kAllreduce, &tensor);
  rt_handle *handle = NULL;
  char *error = NULL;
  if (rank == 0) {
    request.refusal = "rank 0 does not like it.";
    CHECK(rt_submit(context, &request, &handle, &error) == kInvalidArgument && handle == NULL);
  } else {
    CHECK(rt_submit(context, &request, &handle, &error) == kOk);
    CHECK(rt_wait(handle, 100, &error) == kInvalidArgument);
    rt_handle_free(handle);
  }
  CHECK(error != NULL && strcmp(error, "rank 0 does not like it. Found on rank 0.") == 0);
  rt_free(error);
  request = Request("no such operation", 99, &tensor);
  CHECK(rt_submit(context, &request, &handle, NULL) == kInvalidArgument);
  tensor.dtype = 99;
  request = Request("no such dtype", kAllreduce, &tensor);
  CHECK(rt_submit(context, &request, &handle, NULL) == kInvalidArgument);
}

static void Observation(rt_context *context, int rank) {
  rt_world world;
  rt_world_of(context, &world);
  CHECK(world.rank == rank && world.size == 2 && world.local_rank == rank && world.local_size == 2);
  CHECK(world.cross_rank == 0 && world.cross_size == 1 && world.homogeneous == 1);
  int64_t values[32];
  const int32_t counters = rt_counters(context, values, 32);
  CHECK(counters > 0 && counters <= 32 && values[0] > 0);
  char path[64];
  snprintf(path, sizeof path, "/tmp/c_api_test.%ld.{rank}.json", (long)rank);
  CHECK(rt_timeline_start(context, path, 1, NULL) == kOk);
  CHECK(rt_timeline_stop(context, NULL) == kOk);
  snprintf(path, sizeof path, "/tmp/c_api_test.%ld.%d.json", (long)rank, rank);
  CHECK(remove(path) == 0);
  char *error = NULL;
  CHECK(rt_timeline_start(context, "/no/such/folder/x", 0, &error) != kOk && error != NULL);
  rt_free(error);
  char *line = rt_log_next(context);
  rt_free(line);
}

struct Rank {
  rt_hub *hub;
  int rank;
};

static void *RunRank(void *argument) {
  const struct Rank *me = argument;
  char *error = NULL;
  const char *const options = "spin_microseconds=0\nshutdown_timeout_seconds=20";
  rt_context *context = NULL;
  if (!CHECK(rt_open_in_process(me->hub, me->rank, options, &context, &error) == kOk)) return NULL;
  Operations(context, me->rank);
  ProcessSets(context);
  Descriptions(context, me->rank);
  Refusals(context, me->rank);
  Observation(context, me->rank);
  CHECK(rt_close(context, -1, &error) == kOk);
  rt_context_free(context);
  return NULL;
}

static void *AbortRank(void *argument) {
  const struct Rank *me = argument;
  const int64_t one = 1;
  float value = 1;
  rt_tensor tensor = Floats(&value, &value, &one);
  rt_request request = Request(me->rank == 0 ? "only here" : "and only here", kAllreduce, &tensor);
  rt_context *context = NULL;
  rt_handle *handle = NULL;
  char *error = NULL;
  if (!CHECK(rt_open_in_process(me->hub, me->rank, NULL, &context, NULL) == kOk)) return NULL;
  if (rt_submit(context, &request, &handle, &error) == kOk) {
    CHECK(rt_wait(handle, 0, NULL) != kOk);
    if (me->rank == 0) rt_abort(context, "out of luck");
    CHECK(rt_wait(handle, 100, &error) == kPeerLost);
  }
  CHECK(error != NULL && strcmp(error, "out of luck") == 0);
  rt_free(error);
  rt_context_free(context); /* closes it */
  if (handle != NULL) CHECK(rt_poll(handle) == kPeerLost);
  rt_handle_free(handle);
  return NULL;
}

static void InTwoRanks(void *(*body)(void *)) {
  rt_hub *hub = NULL;
  if (!CHECK(rt_hub_open(2, NULL, &hub, NULL) == kOk)) return;
  struct Rank ranks[2] = {{hub, 0}, {hub, 1}};
  pthread_t threads[2];
  for (int rank = 0; rank < 2; ++rank) CHECK(pthread_create(&threads[rank], NULL, body, &ranks[rank]) == 0);
  for (int rank = 0; rank < 2; ++rank) pthread_join(threads[rank], NULL);
  rt_hub_close(hub);
}

static void Static(void) {
  CHECK(rt_abi_version() == RT_ABI_VERSION);
  const rt_functions *const functions = rt_functions_for(RT_ABI_VERSION);
  CHECK(functions != NULL && functions->submit == rt_submit && functions->handle_free == rt_handle_free);
  CHECK(functions->free == rt_free && functions->received_splits == rt_received_splits && functions->result == rt_result);
  CHECK(functions->world_of == rt_world_of && functions->process_set_ranks == rt_process_set_ranks);
  CHECK(rt_functions_for(RT_ABI_VERSION - 1) == NULL && rt_functions_for(RT_ABI_VERSION + 1) == NULL);
  CHECK(strstr(rt_build_info(), "ringtrain ") == rt_build_info());
  const char *const tables[] = {"dtypes", "operations", "reductions", "compressions", "status", "counters", "options"};
  for (int table = 0; table < 7; ++table) CHECK(rt_table(tables[table]) != NULL && strchr(rt_table(tables[table]), '\t') != NULL);
  CHECK(rt_table("no such table") == NULL);
  rt_free(NULL);
  rt_context_free(NULL);
  rt_handle_free(NULL);
}

static void OpeningFails(void) {
  char *error = NULL;
  rt_hub *hub = NULL;
  rt_context *context = NULL;
  CHECK(rt_hub_open(0, NULL, &hub, &error) == kInvalidArgument && error != NULL);
  rt_free(error);
  CHECK(rt_hub_open(4, "2+1", &hub, &error) == kInvalidArgument);
  CHECK(strstr(error, "2+1") != NULL);
  rt_free(error);
  CHECK(rt_open_mpi("/no/such/library.so", 0, NULL, &context, &error) == kInvalidArgument);
  CHECK(error != NULL);
  rt_free(error);
  CHECK(rt_hub_open(1, "", &hub, NULL) == kOk);
  CHECK(rt_open_in_process(hub, 0, "nonsense", &context, &error) == kInvalidArgument);
  rt_free(error);
  CHECK(rt_open_in_process(hub, 5, NULL, &context, NULL) == kInvalidArgument);
  CHECK(context == NULL);
  if (!CHECK(rt_open_in_process(hub, 0, "", &context, NULL) == kOk)) return;
  rt_hub_close(hub); /* the context keeps it alive */
  CHECK(rt_close(context, -1, NULL) == kOk);
  rt_request request = Request("late", kBarrier, NULL);
  rt_handle *handle;
  CHECK(rt_submit(context, &request, &handle, NULL) == kClosed);
  rt_context_free(context);
}

int main(void) {
  Static();
  OpeningFails();
  InTwoRanks(RunRank);
  InTwoRanks(AbortRank);
  printf(failures == 0 ? "c_api_test passed\n" : "c_api_test: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
