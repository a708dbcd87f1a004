/* ringtrain's C ABI: everything that Python, or another language, may call.
 *
 * cffi reads the part between the two CFFI marks; C++ includes the whole file.
 * Conventions: opaque pointer first, `char **error` last. A function that can fail returns a status
 * (row of tables/status.def, 0 = ok), and where that is not ok leaves a text in *error that the caller frees
 * with rt_free. `error` may be NULL. Texts end with a NUL: a caller whose texts may contain one refuses or escapes it.
 * Booleans are int. No function calls back into Python.
 * Every function may be called from any thread, except that rt_close ends all others' right to the context.
 */
#ifndef RINGTRAIN_H_
#define RINGTRAIN_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)
/* CFFI begin */
typedef struct rt_context rt_context;       /* one rank of one world */
typedef struct rt_hub rt_hub;               /* N ranks within this process */
typedef struct rt_listener rt_listener;     /* where other ranks reach this one over TCP */
typedef struct rt_handle rt_handle;         /* one submitted operation */
typedef struct rt_alarm rt_alarm;           /* a deadline of this process */
typedef struct rt_authority rt_authority;   /* what numbers the worlds of an elastic job */
typedef struct rt_membership rt_membership; /* a rank's side of that */
typedef struct rt_steps rt_steps;           /* of its steps */
typedef struct rt_samples rt_samples;       /* and of its samples */

/* Version of everything between the CFFI marks. Raised with each change to it: test_abi.py compares. Python
 * (ringtrain/_binding/_native.py) and the library for TensorFlow refuse a core of another version. */
#define RT_ABI_VERSION 28

#define RT_MAX_DIMENSIONS 64            /* of a tensor */
#define RT_MAX_DTYPES 32                /* rows of tables/dtypes.def, with room for more */
#define RT_SECRET_BYTES 32              /* of a job whose ranks are connected by TCP */
#define RT_HIGHEST_WEIGHT 1099511627776 /* 2^40: sums of many are exact in double */

/* One tensor of a request: contiguous memory, row-major. */
typedef struct {
  const void* data; /* input, kept alive and unchanged by the caller until the operation is done */
  /* kSame operations: result, of the input's size; may equal data. Operations with rows, in host memory: NULL, or room
   * for the result, which may hold the input where the result does. */
  void* output;
  int64_t output_bytes; /* of that room: if the result has another size the core allocates, as without room */
  int32_t dtype;        /* row of tables/dtypes.def */
  int32_t device;       /* -1 for host memory, else the index of a CUDA device, the same for all tensors of a request */
  void* stream; /* of a device: the CUstream whose work until now data and output wait for; NULL is the legacy stream */
  int32_t ndim;
  const int64_t* shape;
} rt_tensor;

/* Memory for one output once its size is known; called on the core's thread: must not block nor call Python. */
typedef void* (*rt_allocate)(void* callback_context, int32_t tensor, int32_t ndim, const int64_t* shape);
/* The operation ended, with a status; `error` (NULL if ok) is valid during the call. Same thread, same rules. With
 * tensors on a GPU: when that has done its work, or never will, which is later than rt_wait returns. */
typedef void (*rt_done)(void* callback_context, int32_t status, const char* error);

typedef struct {
  const char* name;      /* identity among the ranks of the process set; equal on all of them; UTF-8 */
  int32_t operation;     /* row of tables/operations.def */
  int32_t reduction;     /* row of tables/reductions.def, where the operation reduces */
  int32_t process_set;   /* 0 is the world */
  int32_t root;          /* global rank, where the operation is rooted */
  double prescale;       /* factor on each contribution */
  double postscale;      /* factor on the result, after averaging */
  const int64_t* weight; /* NULL, or what this rank's contribution counts in a weighted average, in samples say; on all
                            ranks or none */
  int32_t compression;   /* row of tables/compressions.def, where the operation reduces */
  int32_t tensor_count;  /* several tensors form a group: all or nothing, one handle */
  const rt_tensor* tensors;
  int32_t split_count;   /* alltoall: rows for each member, per tensor 0; add_process_set: global ranks; */
  const int64_t* splits; /*   remove_process_set: one entry, the id */
  const char* refusal;   /* NULL, or why the caller refuses this submission: announced to the peers */
  int32_t
      refusal_status;   /* with it what all get: mismatch or unsupported of tables/status.def, else invalid_argument */
  int32_t caller_waits; /* 1 if rt_wait follows at once: saves waking the core's thread */
  int32_t cacheable;    /* 0 for names that will not come again */
  rt_allocate allocate; /* NULL: the core allocates, and rt_output hands the memory out */
  rt_done done;         /* NULL: nobody is called */
  void* callback_context;
} rt_request;

/* No function throws. A text that the caller frees with rt_free is NULL where there is no memory for it; a function of
 * which nothing else is said returns 1, or 0 where there is no memory for what it does. */
/* RT_ABI_VERSION as the library was built with it; a caller compiled with another one must not go on. */
int32_t rt_abi_version(void);
/* Text: compiler, processor kernels in use, build type. Static. */
const char* rt_build_info(void);
/* Rows of the tables as lines, columns parted by tabs, one table per name: dtypes, operations, reductions,
 * attributes, compressions, status, counters, options. Static; NULL for an unknown name. */
const char* rt_table(const char* name);
void rt_free(void* memory);
/* Memory of results that were freed is kept for the next ones of their size, up to 256 MB; this gives it back. */
void rt_trim(void);
/* Where NCCL lies if nothing better is found: a wheel's file. interfaces: what NCCL_SOCKET_IFNAME tells it, for the
 * texts of its errors; native code reads no environment. Both count before the first tensor on a GPU. */
void rt_suggest_nccl(const char* path, const char* interfaces);
/* The GPU libraries as lines "name|version|path", or "name||what is wrong"; loads them. cuda_lib, nccl_lib: the
 * options. The caller frees it with rt_free. */
char* rt_gpu_libraries(const char* cuda_lib, const char* nccl_lib);

/* ---- worlds ---- */
/* N ranks in this process. layout: ranks per simulated host ("2+2"), NULL or "" for one host. */
int32_t rt_hub_open(int32_t size, const char* layout, rt_hub** hub, char** error);
/* Closes the hub; contexts that are still open on it keep it alive. */
void rt_hub_close(rt_hub* hub);
/* options: "name=value" lines, rows of tables/options.def; NULL for the defaults.
 * Blocks until all ranks of the world have called it, or start_timeout_seconds. */
int32_t rt_open_in_process(rt_hub* hub, int32_t rank, const char* options, rt_context** context, char** error);
/* library: path of a loaded shared object from which MPI's functions can be found (mpi4py.MPI.__file__);
 * communicator: its handle, as mpi4py.MPI._handleof gives it. It is duplicated. */
int32_t rt_open_mpi(const char* library, uintptr_t communicator, const char* options, rt_context** context,
                    char** error);
/* Listens for the other ranks of a world over TCP. addresses: "ip:port" for each link between the hosts, parted by
 * commas; the port may be 0 (any) or a range such as 4711-4720 (the first that is free). */
int32_t rt_listen(const char* addresses, rt_listener** listener, char** error);
/* The addresses with the ports that were found, as the other ranks must be told; the caller frees them with rt_free. */
char* rt_listener_addresses(rt_listener* listener);
void rt_listener_close(rt_listener* listener);
/* A rank of a world over TCP; its listener serves one world, and is empty afterwards. peers: the addresses of all
 * ranks' listeners by rank, a line each; their number is the world's size. secret: RT_SECRET_BYTES that this job alone
 * knows, by which every connection is proven; overwritten with zeros. epoch: of the world; ranks of another are not
 * heard. */
int32_t rt_open_tcp(rt_listener* listener, int32_t rank, const char* peers, uint8_t* secret, uint64_t epoch,
                    const char* options, rt_context** context, char** error);
/* Ends this rank's part: tells the others, waits for them up to `seconds` (negative: shutdown_timeout_seconds) while
 * none of them is found dead, fails what is pending. Not ok if the world had failed, with its cause: some rank may
 * never come to its end. Afterwards only rt_context_free and the rank/size questions are allowed. */
int32_t rt_close(rt_context* context, double seconds, char** error);
/* Frees the context; closes it first if need be. Handles stay valid. */
void rt_context_free(rt_context* context);
/* Ends this process with the text on stderr and exit code 1, unless rt_alarm_cancel comes within so many seconds:
 * around a call that waits for other processes and cannot be interrupted, such as MPI_Init. NULL: there is no thread
 * for it. */
rt_alarm* rt_alarm_set(double seconds, const char* text);
void rt_alarm_cancel(rt_alarm* alarm);
/* Fails everything pending and everything later on all ranks with this cause; the first cause wins. */
void rt_abort(rt_context* context, const char* cause);
/* Ranks with which this one finds fault, another host by its lowest; returns their number, or -1 without memory. */
#define RT_SILENT 0  /* it has found its world to have ended by their silence */
#define RT_UNHEARD 1 /* it had not heard them for half of that bound when it looked last; itself, if it was stopped */
#define RT_MISSING 2 /* an operation has waited for them until it was given up */
#define RT_REFUSED 3 /* of a rank's membership alone: they join with values that do not fit, and have been told so */
int32_t rt_suspects(rt_context* context, int32_t why, int32_t* ranks, int32_t capacity);
/* What a stall needs of the caller is written to the pipe, for a thread of its own to read: "s" when others wait for
 * this rank and the caller's stacks are to be written to stderr, "l" when the log has a warning. If an "s" is
 * still unread after five seconds, option stack_signal is raised, given a handler for it. */
void rt_ask_through(rt_context* context, int32_t pipe);
/* This rank will submit nothing for so many seconds: what waits for it is neither reported nor given up meanwhile. 0:
 * it is back. */
void rt_long_phase(rt_context* context, double seconds);
/* Ranks from this one on take over the state of the others, who wait for them: these are silent for a shorter time
 * until they count as dead. The number of ranks: none do any more. */
void rt_await_state_from(rt_context* context, int32_t first);

typedef struct {
  int32_t rank, size, local_rank, local_size, cross_rank, cross_size, homogeneous;
  int32_t site; /* of this rank, in the order of the sites' lowest ranks */
  uint32_t epoch;
} rt_world;
void rt_world_of(rt_context* context, rt_world* world);
/* Members of a process set, ascending; returns their number, -1 if there is no such set, or -2 without memory. */
int32_t rt_process_set_ranks(rt_context* context, int32_t process_set, int32_t* ranks, int32_t capacity);
/* How many hosts its tensors travel between: where the algorithm is "ring" each rank counts as one. 0 if there is no
 * such set, -1 without memory. */
int32_t rt_process_set_hosts(rt_context* context, int32_t process_set);
/* Counters in the order of tables/counters.def; returns how many there are. */
int32_t rt_counters(rt_context* context, int64_t* values, int32_t capacity);
/* Ranks that submitted operations last, as a line "rank|times|total nanoseconds|longest|name of that operation" each;
 * only where this rank coordinates a process set, as rank 0 does the world. The caller frees it with rt_free. */
char* rt_lateness(rt_context* context);
/* Next line of the context's log, "level|text", or NULL; the caller frees it with rt_free. */
char* rt_log_next(rt_context* context);
/* Rank 0 writes the file of that name, another rank one with its number behind it; "{rank}" in it is replaced by the
 * rank on all. mark_cycles: whether each batch leaves an event CYCLE_START. */
int32_t rt_timeline_start(rt_context* context, const char* path, int32_t mark_cycles, char** error);
int32_t rt_timeline_stop(rt_context* context, char** error);
/* What has been exchanged, as a line "operation|size class|operations|bytes|bytes that each member must send at
 * least|nanoseconds under way|nanoseconds from submission to agreement" for each operation and class; that of sizes in
 * [2^(c-1), 2^c) bytes is c. The caller frees it with rt_free. */
char* rt_traffic(rt_context* context);
/* What the transport has found of the way to each rank that this one sends tensors to, and has taken for it, as a line
 * "rank|connections over each link|congestion control|seconds of a round trip|bytes a second|share of packets lost"
 * each; none where a library connects the ranks. The caller frees it with rt_free. */
char* rt_lines(rt_context* context);
/* Of small operations that nobody waits for: from so many on they leave. */
int64_t rt_burst_bytes(rt_context* context);
/* The last operations of this rank, as JSON: what option flight_record writes. The caller frees it with rt_free. */
char* rt_flight_record(rt_context* context);

/* ---- what compression has lost ---- */
/* Compressions with feedback keep what rounding has lost of each tensor of a named operation, and make up for it when
 * the operation comes again. While none of those named is under way: */
/* The results of the last operation of each name that begins with the prefix were used. */
int32_t rt_residuals_keep(rt_context* context, int32_t process_set, const char* prefix);
/* They were not: what the operation has lost is taken back, unless it was kept before, or has a number up to `after`;
 * -1: whatever it is. */
int32_t rt_residuals_take_back(rt_context* context, int32_t process_set, const char* prefix, int64_t after);
/* The number of the last operation that has lost anything; it goes on in the next world. */
int64_t rt_residuals_turns(rt_context* context);
/* The world of `former` has ended, and this one is the next of the same elastic job: what this rank has lost in the set
 * of all ranks is added, under the same names, to what it contributes next. */
int32_t rt_residuals_inherit(rt_context* context, rt_context* former);
/* Those of the names that begin with the prefix, as lines "elements|place in the operation|name of the operation"; the
 * caller frees it with rt_free. Names with line ends are left out. */
char* rt_residuals(rt_context* context, int32_t process_set, const char* prefix);
/* What is kept of one of them, or zeros: of what this rank's host sends, and of the sums that it finishes, both zero
 * where another rank rounds the element. Returns 1 if it is what was loaded, whole, since no operation came; else 0, or
 * -1 without memory. */
int32_t rt_residual_save(rt_context* context, int32_t process_set, const char* name, int32_t place, int64_t elements,
                         float* sent, float* finished);
/* Of all elements: the next operation takes those that this rank rounds. */
int32_t rt_residual_load(rt_context* context, int32_t process_set, const char* name, int32_t place, int64_t elements,
                         const float* sent, const float* finished);

/* ---- operations ---- */
/* Where an object that describes memory has its fields, such as an array of NumPy: offsets in bytes. */
typedef struct {
  int32_t data, ndim, shape, dtype, flags; /* void *, int, int64_t *, void *, int */
  int32_t needs;                           /* flags that all must have */
  uintptr_t dtypes[RT_MAX_DTYPES];         /* what `dtype` is for each row of tables/dtypes.def; 0: no object has it */
} rt_layout;
/* Describes tensors in host memory by such objects: the inputs, and where the results go, by their addresses. Stops at
 * the first that lacks a flag or has another dtype, and returns how many it has described. The shapes stay those of the
 * objects, which nobody changes until the tensors were submitted. */
int32_t rt_describe(const rt_layout* layout, const uintptr_t* inputs, const uintptr_t* outputs, int32_t count,
                    rt_tensor* tensors);
/* Puts addresses into the tensors of a request that is used again: of each, data and output. For groups of many
 * tensors, of which a caller has the addresses in arrays. */
void rt_place(rt_tensor* tensors, int32_t count, const void* const* data, void* const* outputs);
/* 64 bits that tell memory apart, at the speed of reading it; another seed gives others. */
uint64_t rt_digest(const void* memory, size_t bytes, uint64_t seed);
/* On success *handle is set and the operation is pending. A refusal raises here and is announced to the peers. */
int32_t rt_submit(rt_context* context, const rt_request* request, rt_handle** handle, char** error);
/* Status of the operation; pending (1) if timeout_seconds passed first. With tensors on a GPU it is ok as soon as all
 * work is on the GPU's queue: whoever uses the result must make a stream wait for it. */
int32_t rt_wait(rt_handle* handle, double timeout_seconds, char** error);
/* Makes what the stream is given from now on wait for the result, on the GPU. Nothing to do for host memory. */
int32_t rt_stream_wait(rt_handle* handle, void* stream, char** error);
/* Status without waiting; with tensors on a GPU, pending until that has done its work, and the tensors may go. */
int32_t rt_poll(rt_handle* handle);
/* Output of a finished operation: its memory, owned by the handle until rt_take_output, and its shape (room for
 * RT_MAX_DIMENSIONS). */
int32_t rt_output(rt_handle* handle, int32_t tensor, void** data, int32_t* ndim, int64_t* shape, char** error);
/* Hands the memory of a core-allocated output to the caller, who frees it with rt_free, or with rt_device_free where
 * the tensors are on a GPU; NULL if there is none. */
void* rt_take_output(rt_handle* handle, int32_t tensor);
void rt_device_free(int32_t device, void* memory);
/* Copies memory of a GPU to the host's once the stream has come so far, and waits for that. */
int32_t rt_device_read(rt_context* context, int32_t device, void* stream, const void* from, size_t bytes, void* to,
                       char** error);
/* Memory of a GPU, for an output whose library has none to give; freed with rt_device_free. */
int32_t rt_device_allocate(rt_context* context, int32_t device, size_t bytes, void** memory, char** error);
/* Index of the GPU on which memory lies; -1 if the driver does not know it, or there is none. cuda_lib: the option. */
int32_t rt_device_of(const char* cuda_lib, const void* memory);
/* alltoall: rows received from each member; returns their number. */
int32_t rt_received_splits(rt_handle* handle, int64_t* splits, int32_t capacity);
/* join: the rank that joined last. add_process_set: the new id. */
int32_t rt_result(rt_handle* handle);
/* Gives the handle back. A pending operation goes on; its tensors must stay alive until it is done. */
void rt_handle_free(rt_handle* handle);

/* ---- elastic jobs ---- */
/* elastic/authority.h and elastic/membership.h, which decide and wait for nothing. Each is used by one thread at a
 * time. A function that takes an event returns how many actions follow from it, or -1 without memory. rt_authority_next
 * and rt_membership_next then give them in the order in which they are carried out: each returns 1, 0 behind the last,
 * or -1 without memory. What an action points to is there until the next call. Uids are texts of 32 hexadecimal digits,
 * times in seconds of CLOCK_MONOTONIC. */
#define RT_DO_WRITE 0    /* authority: frame is a record, which must be on the disk before what follows */
#define RT_DO_SEND 1     /* authority: frame to the process with this uid; membership: frame to the authority */
#define RT_DO_EVICT 2    /* authority: the same, and its end */
#define RT_DO_ASK 3      /* authority: frame to all processes of the host */
#define RT_DO_BEAT 4     /* authority: a sign of life to the host */
#define RT_DO_START 5    /* authority: a rank in that slot of the host */
#define RT_DO_LET_GO 6   /* authority: the agent of the host, which comes again once its network has been checked */
#define RT_DO_SAY 7      /* authority: text, to people */
#define RT_DO_END 8      /* authority: well, because of text */
#define RT_DO_ABANDON 9  /* membership: what is under way in the present world, and its connections */
#define RT_DO_CONNECT 10 /* membership: the world with this number; frame is its key */
#define RT_DO_RUN 11     /* membership: the world that was connected */
#define RT_DO_PAUSE 12   /* membership: the world is to be left by all together */
#define RT_DO_DEPART 13  /* membership: the process may end */
#define RT_DO_FENCE 14   /* membership: the process must end, because of text */
typedef struct {
  int32_t kind; /* of those above */
  int32_t slot;
  int32_t well;
  const char* host;
  const char* uid;
  const char* text;
  const void* frame;
  size_t frame_bytes;
} rt_authority_action;
typedef struct {
  const char* uid;
  const char* host;
  int32_t slot;
  int32_t joins;
  const char* address; /* where it listens */
} rt_member;
typedef struct {
  int32_t kind; /* of those above */
  int32_t rank; /* of this process among the members */
  uint64_t world;
  const rt_member* members; /* by rank */
  int32_t member_count;
  const char* text;
  const void* frame;
  size_t frame_bytes;
} rt_membership_action;
typedef struct {
  int32_t minimum;     /* ranks that a world must have */
  int32_t reset_limit; /* worlds after the first; 0: any number */
  double silence;      /* of an agent, that counts as its loss */
  double grace;        /* without a launcher, after which agents and ranks end themselves */
  double wait;         /* below the minimum, until the job ends */
  double first_pause;  /* of a slot in which a rank has failed, until another one is started there; doubles each time */
  double longest_pause; /* which it does not exceed */
} rt_authority_options;
/* hosts: lines "name|slots". NULL for what is none. */
rt_authority* rt_authority_begin(const char* hosts, const rt_authority_options* options, double now);
/* The same of a launcher that takes a job up: record: the last one written, or nothing. */
rt_authority* rt_authority_resume(const char* hosts, const rt_authority_options* options, const void* record,
                                  size_t record_bytes, double now);
void rt_authority_free(rt_authority* authority);
int32_t rt_authority_next(rt_authority* authority, rt_authority_action* action);
/* The connection to the agent of a host is open; what is there: the uids of its processes, the newest Form that it has
 * passed on, or nothing, and whether some program has come to its end there. */
int32_t rt_authority_host_came(rt_authority* authority, double now, const char* host);
int32_t rt_authority_host_present(rt_authority* authority, double now, const char* host, const char* const* uids,
                                  int32_t count, const void* record, size_t record_bytes, int32_t finished);
/* That connection is lost; it has carried something. */
int32_t rt_authority_host_lost(rt_authority* authority, double now, const char* host, const char* cause);
int32_t rt_authority_host_heard(rt_authority* authority, double now, const char* host);
/* A host may have ranks from now on, once it has come; also one that has left, when all of it is gone. Returns 1, or 0
 * without memory. */
int32_t rt_authority_host_added(rt_authority* authority, const char* host, int32_t slots);
/* All ranks of a host leave on notice, because of this; the process with this uid alone does. */
int32_t rt_authority_host_leaves(rt_authority* authority, double now, const char* host, const char* cause);
int32_t rt_authority_process_leaves(rt_authority* authority, double now, const char* host, int32_t slot,
                                    const char* uid);
/* Where an engine of the user's starts the processes, and no hosts were given: one has connected, for the first time or
 * again, and has this slot of its host; its connection has ended, because of this. */
int32_t rt_authority_process_came(rt_authority* authority, double now, const char* host, int32_t slot, const char* uid);
int32_t rt_authority_process_gone(rt_authority* authority, double now, const char* host, int32_t slot, const char* uid,
                                  const char* cause);
/* A frame of a rank there; what is none has no effect. */
int32_t rt_authority_arrived(rt_authority* authority, double now, const char* host, const void* frame, size_t bytes);
/* The process with this uid, which was started in a slot, has ended: exit code, or -signal. */
int32_t rt_authority_process_ended(rt_authority* authority, double now, const char* host, int32_t slot, const char* uid,
                                   int32_t exit_code);
int32_t rt_authority_tick(rt_authority* authority, double now);
double rt_authority_next_timer(rt_authority* authority); /* infinite once the job has ended */

/* address: where the rank listens for others. program: what must be equal on all ranks.
 * NULL for a uid that is none. */
rt_membership* rt_membership_open(const char* uid, const char* host, int32_t slot, const char* address,
                                  const char* program);
void rt_membership_free(rt_membership* membership);
int32_t rt_membership_next(rt_membership* membership, rt_membership_action* action);
/* Where it listens from now on: each world has a listener of its own. Returns 1, or 0 without memory. */
int32_t rt_membership_listens_at(rt_membership* membership, const char* address);
int32_t rt_membership_begin(rt_membership* membership);
/* What the authority has sent; what is no frame has no effect. */
int32_t rt_membership_arrived(rt_membership* membership, const void* frame, size_t bytes);
/* The connections of the world with this count stand, or cannot be made. */
int32_t rt_membership_connected(rt_membership* membership, uint64_t count, int32_t well);
/* The world of this rank has ended without a word of the authority. */
int32_t rt_membership_world_ended(rt_membership* membership);
/* What rt_suspects has said of the world of this rank: the launcher asks the silent whether they live, and ends those
 * that are missing; whom else this rank does not hear it tells with its next report. */
int32_t rt_membership_suspects(rt_membership* membership, int32_t why, const int32_t* ranks, int32_t count);
/* Its program has come to its end. */
int32_t rt_membership_finished(rt_membership* membership);
/* A rank that has joined has got the state. Returns 1, or 0 without memory. */
int32_t rt_membership_got_state(rt_membership* membership);
/* Whether somebody new may be in the next world: 1, as it is at first, but within a step that is to be done again. */
void rt_membership_admits(rt_membership* membership, int32_t admits);
/* ---- steps of an elastic job: elastic/step.h, elastic/samples.h ---- */
/* Places are those of ranks in a dealing; a count of -1 is of all of them, where no places follow. */
typedef struct {
  int32_t kind;          /* StepEffect's: 0 finish, 1 deal, 2 refuse unlike, 3 renew sets, 4 take state */
  int64_t world;         /* of deal */
  int32_t size, place;   /* likewise */
  const int32_t* places; /* of finish, until the next call */
  int32_t count;         /* of them */
} rt_step_effect;
/* NULL without memory. */
rt_steps* rt_steps_open(int32_t several);
void rt_steps_free(rt_steps* steps);
void rt_steps_begin(rt_steps* steps);
void rt_steps_begin_part(rt_steps* steps);
void rt_steps_hold(rt_steps* steps, int32_t part);
void rt_steps_drop(rt_steps* steps);
/* Those that have effects return 1, or 0 without memory; then rt_steps_next gives one after the other, and returns 0
 * behind the last. */
int32_t rt_steps_release(rt_steps* steps);
int32_t rt_steps_settle(rt_steps* steps, const int32_t* places, int32_t count);
int32_t rt_steps_next(rt_steps* steps, rt_step_effect* effect);
int32_t rt_steps_has_end_to_come(rt_steps* steps);
int32_t rt_steps_enter_world(rt_steps* steps, int64_t number, int32_t size, int32_t place);
/* Five numbers: holds_state, released, stage, dealt_in, has_sets. */
void rt_steps_standing(rt_steps* steps, int32_t has_sets, int64_t* row);
/* Of all members. place: of this rank in the dealing that is named, or -1 if none is. Returns 1; 0 for what cannot be,
 * -1 without memory. */
int32_t rt_steps_hear(rt_steps* steps, const int64_t* rows, int32_t count, int32_t* place);
void rt_steps_took_state(rt_steps* steps);
int64_t rt_steps_released(rt_steps* steps);
int32_t rt_steps_stage(rt_steps* steps);
/* Of the open window; returns their count. */
int32_t rt_steps_contributors(rt_steps* steps, const int32_t** places);

typedef struct {
  int64_t next, left, draws_left, taken, drawn, batch;
  int32_t size, place;
  const int64_t* given_back; /* until the next call */
  int64_t given_back_count;
} rt_samples_state;
/* cut: 0 positions, 1 batches, 2 growing batches. NULL without memory. */
rt_samples* rt_samples_open(int32_t cut, int64_t count, int64_t batch, int32_t drops_last, int64_t next,
                            const int64_t* given_back, int64_t given_back_count);
void rt_samples_free(rt_samples* samples);
void rt_samples_look(rt_samples* samples, rt_samples_state* state);
void rt_samples_deal(rt_samples* samples, int32_t size, int32_t place);
/* parts: of each place; none for equal shares. Returns -1 without memory. */
int32_t rt_samples_share(rt_samples* samples, const int64_t* parts, int32_t count);
/* costs: of each position of the order; none if all cost alike. Returns -1 without memory. */
int32_t rt_samples_cost(rt_samples* samples, const int64_t* costs, int64_t count);
void rt_samples_forget_ahead(rt_samples* samples);
/* positions: until the next call. Returns their number, or -1 without memory. */
int64_t rt_samples_draw_ahead(rt_samples* samples, const int64_t** positions);
/* These return -1 without memory. rt_samples_shares_left looks at all batches that are left. */
int64_t rt_samples_take(rt_samples* samples, int64_t draws);
int64_t rt_samples_shares_left(rt_samples* samples);
int32_t rt_samples_release(rt_samples* samples, const int32_t* places, int32_t count);
int64_t rt_samples_weight(rt_samples* samples, const int32_t* places, int32_t count);
/* What this rank's positions of the open window cost. */
int64_t rt_samples_work(rt_samples* samples);

/* ---- other native libraries ---- */
/* What a library beside this one uses of it, such as the one that TensorFlow loads; it links against neither Python
 * nor this library. Each entry is the function of that name. */
typedef struct {
  int32_t (*submit)(rt_context* context, const rt_request* request, rt_handle** handle, char** error);
  void (*handle_free)(rt_handle* handle);
  void (*free)(void* memory);
  int32_t (*received_splits)(rt_handle* handle, int64_t* splits, int32_t capacity);
  int32_t (*result)(rt_handle* handle);
  void (*world_of)(rt_context* context, rt_world* world);
  int32_t (*process_set_ranks)(rt_context* context, int32_t process_set, int32_t* ranks, int32_t capacity);
  int32_t (*device_of)(const char* cuda_lib, const void* memory);
} rt_functions;
/* The table for a library that was compiled with this RT_ABI_VERSION; NULL if this one was compiled with another.
 * Static. */
const rt_functions* rt_functions_for(int32_t abi_version);
/* CFFI end */
#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif /* RINGTRAIN_H_ */
