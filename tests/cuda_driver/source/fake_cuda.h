// What the files of the fake driver share. README.md says what the driver is for and which rules it enforces.
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define PRINTF(text, first) __attribute__((format(printf, text, first)))

typedef int CUdevice;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef void *CUcontext, *CUstream, *CUevent;

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_UNKNOWN = 999,
} CUresult;

#define GRANULE_BYTES ((size_t)2 << 20)
#define MAX_PITCH 2147483647 // bytes between rows of a copy, at most
#define PAGE_BYTES ((size_t)4096)
#define MAX_DEVICES 8
#define POISON_NEW 0xDB   // what memory holds before its first write
#define POISON_FREED 0xDD // what importers read after cuMemFree

// --- entry.c: every call begins and ends here ---

// MAY_FAIL_LATE: needs no context, and may give the error of earlier work in the current one.
typedef enum { NEEDS_NOTHING, NEEDS_INIT, MAY_FAIL_LATE, NEEDS_CONTEXT } Needs;

// Holds the driver's lock from begin to end, so that what a call does is one step for every other thread.
CUresult call_begin(const char *name, Needs needs);
CUresult call_end(CUresult result, CUstream stream, const char *arguments, ...) PRINTF(3, 4);
// Says which rule was broken, to stderr and in the trace; gives back `result`.
CUresult refuse(CUresult result, const char *rule, ...) PRINTF(2, 3);
const char *rule_taken(void); // the rule that this thread broke last, and forgets it
#define CALL(needs, work, stream, ...)                                                                                 \
    do {                                                                                                               \
        CUresult result_ = call_begin(__func__, needs);                                                                \
        if (result_ == CUDA_SUCCESS) result_ = (work);                                                                 \
        return call_end(result_, stream, __VA_ARGS__);                                                                 \
    } while (0)

// What the environment says, read once by cuInit.
typedef struct {
    char directory[512]; // of the device: every process that shares it shares the GPUs
    uint64_t seed;
    uint64_t delay_us;            // the longest time that an operation stays queued without need
    uint64_t register_us_per_mib; // cost of pinning
    uint64_t memory_granules;     // of each device
    int device_count;
    int version;      // 13000 = CUDA 13.0
    int compute_mode; // of every device
    bool poison;
    uint64_t bad_memory; // which memory of the devices has a byte that cannot be read; 0 = none
    uint64_t bad_offset; // of the byte in the memory
} Settings;

enum { COMPUTE_DEFAULT = 0, COMPUTE_PROHIBITED = 2, COMPUTE_EXCLUSIVE_PROCESS = 3 };

extern Settings settings;
extern pthread_mutex_t driver_lock;
extern pthread_cond_t driver_changed;    // CLOCK_MONOTONIC; broadcast after each change that somebody may wait for
void wait_for_change(uint64_t until_ns); // releases the lock; 0 = no time limit
uint64_t now_ns(void);
void nap_us(uint64_t microseconds); // does not release the lock

// --- faults.c: randomness by seed ---

typedef enum {
    FAULT_OUT_OF_MEMORY,
    FAULT_LAUNCH_FAILURE,
    FAULT_REFUSED_EXPORT,
    FAULT_REFUSED_REGISTRATION,
    FAULT_IGNORED_HINT,
    FAULT_DEVICE_LOST,
    FAULT_REFUSED_VALUES,
    FAULT_COUNT
} Fault;
// Fixed numbers: the same seed must draw the same in every version.
enum { DRAW_DELAY = 100, DRAW_SHUFFLE = 101, DRAW_ANY_ORDER = 102, DRAW_PAGEABLE = 103, DRAW_BARRIER = 104, DRAW_LATE_ERROR = 105 };

bool faults_read(const char *text);
bool fault_strikes(Fault fault); // counts one chance
uint64_t draw(uint64_t purpose, uint64_t first, uint64_t second);

// --- trace.c ---

void trace_open(const char *path);
bool trace_is_on(void);
void trace_call(const char *name, CUstream stream, CUresult result, const char *rule, const char *arguments);
void trace_ran(const char *operation, CUstream stream, uint64_t sequence, CUresult result, const char *arguments);

// --- errors.c ---

const char *error_name(CUresult result);

// --- device.c: what the processes share ---

CUresult device_open(void);
bool device_valid(CUdevice device);
int device_physical(CUdevice device);  // CUDA_VISIBLE_DEVICES renumbers
CUdevice device_visible(int physical); // -1 if this process does not see it
uint64_t next_order(void);
void device_lose(int physical);
bool device_is_lost(int physical);
// Whether the compute mode lets this process have a context; where it lets one process only, until it is given up.
bool device_claim(int physical);
void device_unclaim(int physical);
// A file of `granules` whose life is counted: an open descriptor with a shared flock, or -1 when the device is full.
int device_allocate(int physical, size_t granules);
// A new descriptor, with an open file description of its own, of the same memory.
int device_reopen(int descriptor, int flags);
// The device that the memory is of; -1 if it is no memory of these devices.
int device_of_descriptor(int descriptor);
// Which memory of the devices it is, counted from 1 in the order in which they were made; 0 if it is none.
uint64_t device_memory_of(int descriptor);
uint64_t device_used_granules(int physical);
// IPC events and handles of cuMemAlloc memory are files of the device's directory with these names.
bool device_file_path(const char *name, char *path, size_t room);

// --- context.c ---

typedef struct {
    CUdevice device;
    unsigned references;
    unsigned flags;
    bool alive;
    uint64_t life; // goes up each time that the context is destroyed
    CUresult sticky;
} Context;

Context *context_current(void); // NULL if none
CUresult context_check(void);
void context_poison(Context *context, CUresult error);

// --- regions.c: address ranges of this process ---

typedef enum { SIDE_DEVICE, SIDE_PINNED, SIDE_PAGEABLE } Side;
typedef enum { REGION_MAPPED, REGION_ALLOCATED, REGION_IPC } RegionKind;
enum { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };

typedef struct {
    uintptr_t address;
    size_t size;
    RegionKind kind;
    int physical;
    unsigned access;
    uint64_t serial; // never used twice: queued work notices that its memory was replaced
    uint64_t handle; // of REGION_MAPPED
    int descriptor;  // of REGION_ALLOCATED and REGION_IPC
    unsigned opened; // of REGION_IPC
    uintptr_t bad;   // a byte that cannot be read; 0 = none
} Region;

typedef struct {
    uintptr_t address;
    size_t size;
    unsigned flags;
    uint64_t serial;
    bool owned; // cuMemHostAlloc
} HostRegion;

typedef struct {
    uintptr_t address;
    size_t size;
} Reservation;

Region *region_add(Region region);
Region *region_at(uintptr_t address);    // that holds the address
Region *region_after(uintptr_t address); // the first one that ends behind the address
void region_remove(uintptr_t address);
void regions_each(void (*visit)(Region *region, void *context), void *context);
HostRegion *host_region_add(HostRegion region); // NULL if a page of it is registered already
HostRegion *host_region_at(uintptr_t address);
void host_region_remove(uintptr_t address);
void host_regions_clear(void);
void reservation_add(Reservation reservation);
Reservation *reservation_of(uintptr_t address, size_t size); // that holds the whole range
bool reservation_touches(uintptr_t address, size_t size);
void reservation_remove(uintptr_t address);
// Which side a range is on, and the sum of the serials of all that it touches; refuses what no copy may touch.
CUresult range_check(uintptr_t address, size_t size, bool is_written, const char *which, Side *side, uint64_t *serials);
uint64_t range_serials(uintptr_t address, size_t size); // the sum alone, without a refusal
bool range_is_bad(uintptr_t address, size_t size);      // whether it has a byte that cannot be read

// --- allocation.c ---

void allocations_drop(int physical); // what cuMemAlloc gave, when its context is destroyed

// --- stream.c and what runs on streams ---

typedef struct Stream Stream;
typedef struct Operation Operation;
typedef enum { RUN_FREE, RUN_LOCKED, WAIT_POINT, WAIT_UNTIL } OperationKind;

struct Operation {
    Operation *next;
    const char *name;
    OperationKind kind;
    uint64_t sequence;
    uint64_t delay_ns; // drawn; of several that may run, the one with the shortest runs first
    uint64_t ready_ns;
    // RUN_FREE without the driver's lock, RUN_LOCKED with it; frees `state`. Never called in a context with an error.
    CUresult (*run)(void *state, char *words, size_t room);
    bool (*is_over)(void *state); // WAIT_UNTIL; with the lock
    void (*drop)(void *state);    // called once, whether it ran or not
    void *state;
    Stream *other; // WAIT_POINT: until this stream has done …
    uint64_t point;
    bool may_fail; // counts as a launch for FAULT_LAUNCH_FAILURE
};

// Resolves the NULL stream; refuses a stream that is gone, or that captures: few calls can be captured.
Stream *stream_find(CUstream handle, CUresult *result);
Stream *stream_find_capturing(CUstream handle, CUresult *result); // one that captures, too
Operation *operation_new(const char *name, OperationKind kind);
void stream_enqueue(Stream *stream, Operation *operation);
// Swaps the two last operations of the queue, if neither has started.
void stream_swap_last(Stream *stream);
uint64_t stream_position(const Stream *stream);
bool stream_has_done(const Stream *stream, uint64_t sequence);
uint64_t stream_serial(const Stream *stream);
Context *stream_context(const Stream *stream);
CUresult stream_finish(Stream *stream, uint64_t sequence); // waits; the work goes on at once
CUresult streams_finish(Context *context);
void streams_abandon(Context *context);
bool in_host_function(void);
bool stream_is_default(const Stream *stream);
void stream_follow(Stream *stream, Stream *other, uint64_t sequence); // what is queued from now on begins after it

// --- graph.c ---

typedef struct Capture Capture;
typedef CUresult (*GraphWork)(Stream *stream, void *state); // queues what a call would have queued
Capture *stream_captures(const Stream *stream);             // NULL where it does not capture
void stream_capture(Stream *stream, Capture *capture);
void capture_add(Capture *capture, GraphWork work, const void *state, size_t size); // copies the state
CUresult capture_break(Capture *capture, const char *why);
CUresult capture_check(const char *call); // whether a capture forbids the call to this thread

// --- copy.c, batch.c ---

// A copy inside this process that meets an address which is gone with a result and not with a signal.
CUresult move_bytes(uintptr_t destination, uintptr_t source, size_t size);

typedef struct {
    uintptr_t destination, source;
    size_t size;
    Side to, from;
    uint64_t destination_serials, source_serials;
    unsigned char *staged; // what the source held when it was read, if that was early
} Piece;

typedef struct {
    uint64_t stream, position; // for the order of the pieces
    size_t count;
    bool is_fill;
    unsigned char byte;
    Piece pieces[];
} Batch;

Batch *batch_new(size_t count);
CUresult piece_check(Piece *piece, bool is_fill); // finds its sides
CUresult piece_stage(Piece *piece);               // reads its source now
void batch_enqueue(Stream *stream, Batch *batch);
void batch_drop(void *state);

#endif
