// Streams. Each is a thread that does its operations in order, each one as late as it may: an operation stays queued for
// a time drawn from the seed, unless somebody waits for it.
#include "fake_cuda.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POLL_NS 500000    // memory that another process writes has nobody who wakes us
#define LOSS_NS 10000000 // neither has a device that another process lost

struct Stream {
    Stream *next; // of every stream that there was: events may name one that is gone
    CUstream handle;
    Context *context;
    unsigned flags;
    uint64_t serial;
    Operation *head, *tail;
    uint64_t queued, done, demanded;
    bool is_busy;    // its first operation has begun
    bool is_default; // the NULL stream of its context
    bool closing;    // destroyed by its user; what is queued is still done
    bool gone;       // its context was destroyed; nothing more is done
    Capture *capture; // what is queued becomes part of a graph
};

enum { NON_BLOCKING = 1 };
static const uintptr_t LEGACY = 1, PER_THREAD = 2;
static Stream *streams;
static uint64_t serials_given;
static _Thread_local bool is_host_function;

bool in_host_function(void) { return is_host_function; }
uint64_t stream_position(const Stream *stream) { return stream->queued; }
bool stream_has_done(const Stream *stream, uint64_t sequence) { return stream->done >= sequence || stream->gone; }
uint64_t stream_serial(const Stream *stream) { return stream->serial; }
Context *stream_context(const Stream *stream) { return stream->context; }
bool stream_is_default(const Stream *stream) { return stream->is_default; }
Capture *stream_captures(const Stream *stream) { return stream->capture; }
void stream_capture(Stream *stream, Capture *capture) { stream->capture = capture; }

static bool is_broken(const Stream *stream) {
    if (!stream->gone && device_is_lost(device_physical(stream->context->device)))
        context_poison(stream->context, CUDA_ERROR_UNKNOWN);
    return stream->gone || stream->context->sticky != CUDA_SUCCESS;
}

// Whoever waits has what it waits for done at once, and only that: all else stays as late as it was.
static void demand(Stream *stream, uint64_t sequence) {
    if (stream->demanded >= sequence) return;
    stream->demanded = sequence;
    pthread_cond_broadcast(&driver_changed);
}

static bool is_run(const Operation *operation) { return operation->kind == RUN_FREE || operation->kind == RUN_LOCKED; }

static bool is_due(const Stream *stream) {
    const Operation *operation = stream->head;
    return operation != NULL && (stream->demanded >= operation->sequence || now_ns() >= operation->ready_ns);
}

// Of the operations that are due at one time the seed says which begins first, and not the scheduler of the machine.
static bool is_next(const Stream *stream) {
    const Operation *mine = stream->head;
    for (const Stream *other = streams; other != NULL && is_run(mine); other = other->next) {
        if (other == stream || other->is_busy || other->head == NULL || !is_run(other->head) || is_broken(other))
            continue;
        uint64_t delay = other->head->delay_ns;
        if (is_due(other) && (delay < mine->delay_ns || (delay == mine->delay_ns && other->serial < stream->serial)))
            return false;
    }
    return true;
}

static void wait_a_while(uint64_t until_ns) {
    uint64_t soon = now_ns() + LOSS_NS;
    wait_for_change(until_ns < soon ? until_ns : soon);
}

static void hold(Stream *stream, const Operation *operation) {
    while (!is_broken(stream) && !(is_due(stream) && is_next(stream)))
        wait_a_while(is_due(stream) ? UINT64_MAX : operation->ready_ns);
    stream->is_busy = true;
    pthread_cond_broadcast(&driver_changed);
}

static void wait_until_over(Stream *stream, Operation *operation) {
    while (operation->kind == WAIT_POINT && !stream_has_done(operation->other, operation->point) &&
           !is_broken(stream)) {
        if (stream->demanded >= operation->sequence) demand(operation->other, operation->point);
        wait_a_while(UINT64_MAX);
    }
    while (operation->kind == WAIT_UNTIL && !is_broken(stream) && !operation->is_over(operation->state))
        wait_for_change(now_ns() + POLL_NS);
}

static void fail(Stream *stream, const Operation *operation, CUresult result) {
    fprintf(stderr, "fake cuda: stream %zu: %s: %s stays for the life of the context\n", (size_t)stream->handle,
            operation->name, error_name(result));
    context_poison(stream->context, result);
}

static void perform(Stream *stream, Operation *operation) {
    char words[256] = "";
    CUresult result = CUDA_SUCCESS;
    if (is_broken(stream)) return;
    if (operation->may_fail && fault_strikes(FAULT_LAUNCH_FAILURE)) result = CUDA_ERROR_LAUNCH_FAILED;
    else if (operation->run != NULL) {
        if (operation->kind == RUN_FREE) pthread_mutex_unlock(&driver_lock);
        result = operation->run(operation->state, words, sizeof words);
        if (operation->kind == RUN_FREE) pthread_mutex_lock(&driver_lock);
    }
    trace_ran(operation->name, stream->handle, operation->sequence, result, words);
    if (result != CUDA_SUCCESS && !stream->gone) fail(stream, operation, result);
}

static void *serve(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&driver_lock);
    for (;;) {
        while (stream->head == NULL && !stream->closing && !stream->gone) wait_for_change(0);
        Operation *operation = stream->head;
        if (operation == NULL) break;
        hold(stream, operation);
        wait_until_over(stream, operation);
        perform(stream, operation);
        stream->head = operation->next;
        if (stream->head == NULL) stream->tail = NULL;
        stream->done = operation->sequence;
        stream->is_busy = false;
        if (operation->drop != NULL) operation->drop(operation->state);
        free(operation);
        pthread_cond_broadcast(&driver_changed);
    }
    pthread_mutex_unlock(&driver_lock);
    return NULL;
}

Operation *operation_new(const char *name, OperationKind kind) {
    Operation *operation = calloc(1, sizeof *operation);
    if (operation == NULL) abort();
    operation->name = name;
    operation->kind = kind;
    return operation;
}

static void append(Stream *stream, Operation *operation) {
    operation->sequence = ++stream->queued;
    if (is_run(operation)) {
        operation->delay_ns = draw(DRAW_DELAY, stream->serial, operation->sequence) % (settings.delay_us + 1) * 1000;
        operation->ready_ns = now_ns() + operation->delay_ns;
    }
    if (stream->tail == NULL) stream->head = operation;
    else stream->tail->next = operation;
    stream->tail = operation;
    pthread_cond_broadcast(&driver_changed);
}

void stream_follow(Stream *stream, Stream *other, uint64_t sequence) {
    if (other == stream || stream_has_done(other, sequence)) return;
    Operation *operation = operation_new("wait for another stream", WAIT_POINT);
    operation->other = other;
    operation->point = sequence;
    append(stream, operation);
}

// The NULL stream and the streams that do not say NON_BLOCKING wait for one another.
void stream_enqueue(Stream *stream, Operation *operation) {
    for (Stream *other = streams; other != NULL && !(stream->flags & NON_BLOCKING); other = other->next)
        if (other->context == stream->context && !(other->flags & NON_BLOCKING) &&
            (stream->is_default || other->is_default))
            stream_follow(stream, other, other->queued);
    append(stream, operation);
}

void stream_swap_last(Stream *stream) {
    Operation *before = stream->head, *last = stream->tail;
    while (before != NULL && before->next != last) before = before->next;
    if (before == NULL || before == stream->head || before->kind != RUN_FREE) return; // the head may have begun
    Operation copy = *before;
    *before = *last;
    *last = copy;
    last->next = NULL;
    before->next = last;
    before->sequence = copy.sequence;
    last->sequence = copy.sequence + 1;
}

CUresult stream_finish(Stream *stream, uint64_t sequence) {
    demand(stream, sequence);
    while (!stream_has_done(stream, sequence)) wait_for_change(0);
    return stream->gone ? CUDA_ERROR_CONTEXT_IS_DESTROYED : stream->context->sticky;
}

CUresult streams_finish(Context *context) {
    for (Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->context == context && !stream->gone) demand(stream, stream->queued);
    for (Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->context == context && !stream->gone) stream_finish(stream, stream->queued);
    return context->sticky;
}

void streams_abandon(Context *context) {
    for (Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->context == context) stream->gone = true;
    pthread_cond_broadcast(&driver_changed);
}

static Stream *create(unsigned flags, bool is_default) {
    pthread_t thread;
    pthread_attr_t detached;
    Stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) abort();
    stream->serial = ++serials_given;
    *stream = (Stream){.next = streams,
                       .handle = is_default ? NULL : (CUstream)(0x10000 + stream->serial * 0x10),
                       .context = context_current(),
                       .flags = flags,
                       .serial = stream->serial,
                       .is_default = is_default};
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    sigset_t all, before; // a signal is for the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, &detached, serve, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
    if (failed) {
        free(stream);
        return NULL;
    }
    return streams = stream;
}

static Stream *default_stream(void) {
    for (Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->is_default && stream->context == context_current() && !stream->gone) return stream;
    return create(0, true);
}

static bool is_captured_by_blocking_stream(const Context *context) {
    for (Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->capture != NULL && stream->context == context && !(stream->flags & NON_BLOCKING)) return true;
    return false;
}

static Stream *find_default(CUresult *result) {
    if (!is_captured_by_blocking_stream(context_current())) return default_stream();
    *result = refuse(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "a stream that captures would wait for the NULL stream");
    return NULL;
}

Stream *stream_find(CUstream handle, CUresult *result) {
    Stream *stream = stream_find_capturing(handle, result);
    if (stream == NULL) return NULL;
    if (stream->capture != NULL) {
        *result = capture_break(stream->capture, "the stream captures, and this is no node of a graph here");
        return NULL;
    }
    return stream;
}

Stream *stream_find_capturing(CUstream handle, CUresult *result) {
    *result = CUDA_SUCCESS;
    if ((uintptr_t)handle == PER_THREAD) {
        *result = refuse(CUDA_ERROR_INVALID_HANDLE, "this driver has no per-thread default stream");
        return NULL;
    }
    if (handle == NULL || (uintptr_t)handle == LEGACY) return find_default(result);
    for (Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream->handle == handle && !stream->closing && !stream->gone && stream->context == context_current())
            return stream;
    *result = refuse(CUDA_ERROR_INVALID_HANDLE, "stream %#zx was destroyed, or is none of the current context",
                     (size_t)handle);
    return NULL;
}

static CUresult give(CUstream *handle, unsigned flags) {
    if (handle == NULL || flags > NON_BLOCKING)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the flags of a stream are 0 or NON_BLOCKING");
    Stream *stream = create(flags, false);
    if (stream == NULL) return refuse(CUDA_ERROR_OUT_OF_MEMORY, "no more threads for streams");
    *handle = stream->handle;
    return CUDA_SUCCESS;
}

static CUresult destroy(CUstream handle) {
    CUresult result;
    Stream *stream = stream_find(handle, &result);
    if (stream == NULL) return result;
    if (stream->is_default) return refuse(CUDA_ERROR_INVALID_HANDLE, "the NULL stream is not destroyed");
    stream->closing = true;
    pthread_cond_broadcast(&driver_changed);
    return CUDA_SUCCESS;
}

static CUresult finish(CUstream handle) {
    CUresult result;
    Stream *stream = stream_find(handle, &result);
    return stream == NULL ? result : stream_finish(stream, stream->queued);
}

static CUresult query(CUstream handle) {
    CUresult result;
    Stream *stream = stream_find(handle, &result);
    if (stream == NULL) return result;
    return stream->done < stream->queued ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

typedef struct {
    void (*function)(void *);
    void *data;
} HostCall;

static CUresult run_host_call(void *state, char *words, size_t room) {
    HostCall *call = state;
    (void)words;
    (void)room;
    is_host_function = true;
    call->function(call->data);
    is_host_function = false;
    return CUDA_SUCCESS;
}

static CUresult queue_host_call(Stream *stream, void *state) {
    Operation *operation = operation_new("host function", RUN_FREE);
    HostCall *call = malloc(sizeof *call);
    if (call == NULL) abort();
    *call = *(HostCall *)state;
    operation->run = run_host_call;
    operation->drop = free;
    operation->state = call;
    operation->may_fail = true;
    stream_enqueue(stream, operation);
    return CUDA_SUCCESS;
}

static CUresult launch(CUstream handle, void (*function)(void *), void *data) {
    CUresult result;
    Stream *stream = stream_find_capturing(handle, &result);
    if (stream == NULL) return result;
    if (function == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "there is no function to launch");
    HostCall call = {function, data};
    if (stream->capture == NULL) return queue_host_call(stream, &call);
    capture_add(stream->capture, queue_host_call, &call, sizeof call);
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    CALL(NEEDS_CONTEXT, give(stream, flags), result_ == CUDA_SUCCESS ? *stream : NULL, "\"flags\":%u", flags);
}
API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    CALL(NEEDS_CONTEXT, give(stream, flags), result_ == CUDA_SUCCESS ? *stream : NULL, "\"flags\":%u,\"priority\":%d",
         flags, priority);
}
API CUresult cuStreamDestroy_v2(CUstream stream) { CALL(NEEDS_CONTEXT, destroy(stream), stream, "%s", ""); }
API CUresult cuStreamSynchronize(CUstream stream) { CALL(NEEDS_CONTEXT, finish(stream), stream, "%s", ""); }
API CUresult cuStreamQuery(CUstream stream) { CALL(NEEDS_CONTEXT, query(stream), stream, "%s", ""); }
API CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data) {
    CALL(NEEDS_CONTEXT, launch(stream, function, data), stream, "\"data\":%zu", (size_t)data);
}
