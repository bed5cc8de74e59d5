// Events. An event stands for what its stream held when it was recorded; one that was never recorded stands for nothing,
// and whoever waits for it does not wait.
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DISABLE_TIMING = 2, INTERPROCESS = 4, ALL_FLAGS = 7, IPC_BYTES = 64 };

typedef struct { // a file that the processes map
    uint64_t recorded, completed;
} SharedEvent;

typedef struct Event Event;
struct Event {
    Event *next;
    CUevent handle;
    unsigned flags;
    bool is_alive;
    bool is_imported;
    Context *context;
    Stream *stream; // of the last record in this process
    uint64_t point;
    uint64_t time_ns;
    SharedEvent *shared; // of INTERPROCESS events
    char file[IPC_BYTES];
};

typedef struct {
    char file[IPC_BYTES];
} IpcHandle;

typedef struct {
    Event *event;
    uint64_t target;
    Context *context;
} Record;

#define POLL_NS 500000
static Event *events;
static uint64_t names_given;

static Event *find(CUevent handle, CUresult *result) {
    for (Event *event = events; event != NULL; event = event->next)
        if (event->handle == handle && event->is_alive) return event;
    *result = refuse(CUDA_ERROR_INVALID_HANDLE, "event %#zx was destroyed, or never was one", (size_t)handle);
    return NULL;
}

static CUresult map_shared(Event *event, int flags) {
    char path[700];
    device_file_path(event->file, path, sizeof path);
    int descriptor = open(path, flags | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor < 0 || ftruncate(descriptor, PAGE_BYTES) != 0)
        return refuse(CUDA_ERROR_MAP_FAILED, "the event of the IPC handle is gone");
    event->shared = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    return event->shared == MAP_FAILED ? refuse(CUDA_ERROR_MAP_FAILED, "no room for the event") : CUDA_SUCCESS;
}

static CUresult add(CUevent *handle, unsigned flags, const char *file, bool is_imported) {
    CUresult result = CUDA_SUCCESS;
    Event *event = calloc(1, sizeof *event);
    if (event == NULL) abort();
    *event = (Event){.next = events,
                     .handle = (CUevent)(0x20000 + ++names_given * 0x10),
                     .flags = flags,
                     .is_alive = true,
                     .is_imported = is_imported,
                     .context = context_current()};
    if (file != NULL) memcpy(event->file, file, sizeof event->file - 1);
    else snprintf(event->file, sizeof event->file, "event-%d-%llu", getpid(), (unsigned long long)names_given);
    if (flags & INTERPROCESS) result = map_shared(event, is_imported ? 0 : O_CREAT | O_EXCL);
    if (result != CUDA_SUCCESS) {
        free(event);
        return result;
    }
    events = event;
    *handle = event->handle;
    return CUDA_SUCCESS;
}

static CUresult create(CUevent *handle, unsigned flags) {
    if (handle == NULL || flags > ALL_FLAGS)
        return refuse(CUDA_ERROR_INVALID_VALUE, "these flags are none of an event");
    if ((flags & INTERPROCESS) && !(flags & DISABLE_TIMING))
        return refuse(CUDA_ERROR_INVALID_VALUE, "INTERPROCESS is given together with DISABLE_TIMING");
    return add(handle, flags, NULL, false);
}

static CUresult destroy(CUevent handle) {
    CUresult result = CUDA_SUCCESS;
    char path[700];
    Event *event = find(handle, &result);
    if (event == NULL) return result;
    event->is_alive = false; // the rest stays: operations that are queued may name it
    if ((event->flags & INTERPROCESS) && !event->is_imported) {
        device_file_path(event->file, path, sizeof path);
        unlink(path);
    }
    return CUDA_SUCCESS;
}

static CUresult run_record(void *state, char *words, size_t room) {
    Record *record = state;
    snprintf(words, room, "\"event\":%zu", (size_t)record->event->handle);
    record->event->time_ns = now_ns();
    if (record->event->shared != NULL)
        __atomic_store_n(&record->event->shared->completed, record->target, __ATOMIC_SEQ_CST);
    return CUDA_SUCCESS;
}

static Operation *operation_of(const char *name, OperationKind kind, Event *event, uint64_t target) {
    Operation *operation = operation_new(name, kind);
    Record *record = malloc(sizeof *record);
    if (record == NULL) abort();
    *record = (Record){event, target, event->context};
    operation->state = record;
    operation->drop = free;
    return operation;
}

static CUresult record(CUevent handle, CUstream stream_handle) {
    CUresult result = CUDA_SUCCESS;
    Stream *stream = stream_find(stream_handle, &result);
    Event *event = stream == NULL ? NULL : find(handle, &result);
    if (event == NULL) return result;
    if (event->context != stream_context(stream))
        return refuse(CUDA_ERROR_INVALID_HANDLE, "event and stream are of different contexts");
    uint64_t target = event->shared == NULL ? 0 : __atomic_add_fetch(&event->shared->recorded, 1, __ATOMIC_SEQ_CST);
    Operation *operation = operation_of("event record", RUN_LOCKED, event, target);
    operation->run = run_record;
    stream_enqueue(stream, operation);
    event->stream = stream;
    event->point = stream_position(stream);
    return CUDA_SUCCESS;
}

static bool shared_is_done(void *state) {
    Record *record = state;
    return __atomic_load_n(&record->event->shared->completed, __ATOMIC_SEQ_CST) >= record->target;
}

static uint64_t shared_target(const Event *event) {
    return __atomic_load_n(&event->shared->recorded, __ATOMIC_SEQ_CST);
}

static CUresult wait_on_stream(CUstream stream_handle, CUevent handle, unsigned flags) {
    CUresult result = CUDA_SUCCESS;
    Stream *stream = stream_find(stream_handle, &result);
    Event *event = stream == NULL ? NULL : find(handle, &result);
    if (event == NULL) return result;
    if (flags != 0) return refuse(CUDA_ERROR_INVALID_VALUE, "the flags of a wait outside of a capture are 0");
    if (event->shared == NULL && event->stream == NULL) return CUDA_SUCCESS; // never recorded: nothing to wait for
    Operation *operation = operation_of("event wait", event->shared != NULL ? WAIT_UNTIL : WAIT_POINT, event, 0);
    if (event->shared != NULL) {
        ((Record *)operation->state)->target = shared_target(event);
        operation->is_over = shared_is_done;
    } else {
        operation->other = event->stream;
        operation->point = event->point;
    }
    stream_enqueue(stream, operation);
    return CUDA_SUCCESS;
}

static bool is_done(const Event *event, uint64_t target) {
    if (event->shared != NULL) return __atomic_load_n(&event->shared->completed, __ATOMIC_SEQ_CST) >= target;
    return event->stream == NULL || stream_has_done(event->stream, event->point);
}

static CUresult query(CUevent handle) {
    CUresult result = CUDA_SUCCESS;
    Event *event = find(handle, &result);
    if (event == NULL) return result;
    if (event->context->sticky != CUDA_SUCCESS) return event->context->sticky;
    return is_done(event, event->shared == NULL ? 0 : shared_target(event)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult synchronize(CUevent handle) {
    CUresult result = CUDA_SUCCESS;
    Event *event = find(handle, &result);
    if (event == NULL) return result;
    if (event->shared == NULL) return event->stream == NULL ? CUDA_SUCCESS : stream_finish(event->stream, event->point);
    uint64_t target = shared_target(event);
    if (event->stream != NULL) stream_finish(event->stream, event->point);
    while (!is_done(event, target) && event->context->sticky == CUDA_SUCCESS) wait_for_change(now_ns() + POLL_NS);
    return event->context->sticky;
}

static CUresult elapsed(float *milliseconds, CUevent first, CUevent second) {
    CUresult result = CUDA_SUCCESS;
    Event *start = find(first, &result), *end = start == NULL ? NULL : find(second, &result);
    if (end == NULL) return result;
    if (milliseconds == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the time needs a place");
    if ((start->flags | end->flags) & DISABLE_TIMING)
        return refuse(CUDA_ERROR_INVALID_HANDLE, "one of the events takes no time");
    if (start->stream == NULL || end->stream == NULL)
        return refuse(CUDA_ERROR_INVALID_HANDLE, "one of the events was not recorded");
    if (!is_done(start, 0) || !is_done(end, 0)) return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)end->time_ns - (double)start->time_ns) / 1e6f;
    return CUDA_SUCCESS;
}

static CUresult get_handle(IpcHandle *shared, CUevent handle) {
    CUresult result = CUDA_SUCCESS;
    Event *event = find(handle, &result);
    if (event == NULL) return result;
    if (shared == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the IPC handle needs a place");
    if (!(event->flags & INTERPROCESS))
        return refuse(CUDA_ERROR_INVALID_HANDLE, "the event was not created INTERPROCESS");
    memcpy(shared->file, event->file, sizeof shared->file);
    return CUDA_SUCCESS;
}

static CUresult open_handle(CUevent *handle, IpcHandle shared) {
    shared.file[IPC_BYTES - 1] = '\0';
    if (handle == NULL || strncmp(shared.file, "event-", 6) != 0 || strchr(shared.file, '/') != NULL)
        return refuse(CUDA_ERROR_INVALID_HANDLE, "this is no IPC handle of an event");
    return add(handle, DISABLE_TIMING | INTERPROCESS, shared.file, true);
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    CALL(NEEDS_CONTEXT, create(event, flags), NULL, "\"flags\":%u,\"event\":%zu", flags,
         result_ == CUDA_SUCCESS ? (size_t)*event : 0);
}
API CUresult cuEventDestroy_v2(CUevent event) {
    CALL(NEEDS_INIT, destroy(event), NULL, "\"event\":%zu", (size_t)event);
}
API CUresult cuEventRecord(CUevent event, CUstream stream) {
    CALL(NEEDS_CONTEXT, record(event, stream), stream, "\"event\":%zu", (size_t)event);
}
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    CALL(NEEDS_CONTEXT, wait_on_stream(stream, event, flags), stream, "\"event\":%zu", (size_t)event);
}
API CUresult cuEventQuery(CUevent event) { CALL(NEEDS_INIT, query(event), NULL, "\"event\":%zu", (size_t)event); }
API CUresult cuEventSynchronize(CUevent event) {
    CALL(NEEDS_INIT, synchronize(event), NULL, "\"event\":%zu", (size_t)event);
}
API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end) {
    CALL(NEEDS_INIT, elapsed(milliseconds, start, end), NULL, "\"start\":%zu,\"end\":%zu", (size_t)start, (size_t)end);
}
API CUresult cuIpcGetEventHandle(IpcHandle *handle, CUevent event) {
    CALL(NEEDS_CONTEXT, get_handle(handle, event), NULL, "\"event\":%zu", (size_t)event);
}
API CUresult cuIpcOpenEventHandle(CUevent *event, IpcHandle handle) {
    CALL(NEEDS_CONTEXT, open_handle(event, handle), NULL, "\"event\":%zu",
         result_ == CUDA_SUCCESS ? (size_t)*event : 0);
}
