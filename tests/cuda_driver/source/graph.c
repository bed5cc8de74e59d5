// Graphs. A stream that captures does nothing: what is queued becomes a node, with the addresses of the call. A launch
// queues every node again, with these addresses, and they are looked at then: memory that has gone is gone for the graph,
// and memory that was mapped again at the same address is used. Nodes are host functions, copies and fills; all else that
// a stream can do breaks the capture, and so does every call that waits or that a capture elsewhere forbids.
#include "fake_cuda.h"

#include <stdlib.h>
#include <string.h>

typedef enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED, MODE_COUNT } Mode;

typedef struct Node Node;
struct Node {
    Node *next;
    GraphWork work;
    size_t size;
    unsigned char state[];
};

typedef struct Graph Graph;
struct Graph { // one that is captured, or one that can be launched
    Graph *next;
    void *handle;
    Node *first, *last;
    bool is_executable, is_alive;
    Stream *stream; // of the last launch, which the next one follows
    uint64_t point;
};

struct Capture {
    Capture *next;
    Graph *graph;
    Mode mode;
    pthread_t thread;
    bool is_broken;
};

static Graph *graphs;
static Capture *captures;
static uint64_t names_given;
static _Thread_local Mode thread_mode = MODE_GLOBAL;

static Graph *add_graph(bool is_executable) {
    Graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) abort();
    *graph = (Graph){.next = graphs,
                     .handle = (void *)(0x30000 + ++names_given * 0x10),
                     .is_executable = is_executable,
                     .is_alive = true};
    return graphs = graph;
}

static Graph *find_graph(void *handle, bool is_executable, CUresult *result) {
    for (Graph *graph = graphs; graph != NULL; graph = graph->next)
        if (graph->handle == handle && graph->is_alive && graph->is_executable == is_executable) return graph;
    *result = refuse(CUDA_ERROR_INVALID_HANDLE, "graph %#zx was destroyed, or never was one", (size_t)handle);
    return NULL;
}

static void add_node(Graph *graph, GraphWork work, const void *state, size_t size) {
    Node *node = calloc(1, sizeof *node + size);
    if (node == NULL) abort();
    node->work = work;
    node->size = size;
    memcpy(node->state, state, size);
    if (graph->last == NULL) graph->first = node;
    else graph->last->next = node;
    graph->last = node;
}

static void drop(Graph *graph) { // its handle is never given again
    while (graph->first != NULL) {
        Node *node = graph->first;
        graph->first = node->next;
        free(node);
    }
    graph->last = NULL;
    graph->is_alive = false;
}

void capture_add(Capture *capture, GraphWork work, const void *state, size_t size) {
    if (!capture->is_broken) add_node(capture->graph, work, state, size);
}

CUresult capture_break(Capture *capture, const char *why) {
    capture->is_broken = true;
    return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s; the capture is broken", why);
}

static bool is_forbidden_by(const Capture *capture) {
    bool is_mine = pthread_equal(capture->thread, pthread_self());
    if (thread_mode == MODE_RELAXED || capture->mode == MODE_RELAXED) return false;
    return is_mine || (thread_mode == MODE_GLOBAL && capture->mode == MODE_GLOBAL);
}

// The documents say "potentially unsafe" and give no list. Here it is all that waits, and all that changes what is mapped.
static bool is_unsafe(const char *call) {
    static const char *const UNSAFE[] = {
        "cuCtxSynchronize",     "cuStreamSynchronize", "cuStreamQuery", "cuEventSynchronize", "cuEventQuery",
        "cuMemAlloc_v2",        "cuMemFree_v2",        "cuMemHostAlloc", "cuMemFreeHost",     "cuMemHostRegister_v2",
        "cuMemHostUnregister",  "cuMemMap",            "cuMemUnmap",    "cuMemSetAccess",     "cuMemcpy",
        "cuMemcpyHtoD_v2",      "cuMemcpyDtoH_v2",     "cuMemcpyDtoD_v2", "cuMemsetD8_v2",    "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle",
    };
    for (size_t each = 0; each < sizeof UNSAFE / sizeof *UNSAFE; each++)
        if (strcmp(UNSAFE[each], call) == 0) return true;
    return false;
}

CUresult capture_check(const char *call) {
    CUresult result = CUDA_SUCCESS;
    if (captures == NULL || !is_unsafe(call)) return result;
    for (Capture *capture = captures; capture != NULL; capture = capture->next)
        if (is_forbidden_by(capture)) result = capture_break(capture, "the call is unsafe while a stream captures");
    return result;
}

static CUresult begin(CUstream handle, Mode mode) {
    CUresult result;
    if (mode >= MODE_COUNT) return refuse(CUDA_ERROR_INVALID_VALUE, "this is no mode of a capture");
    Stream *stream = stream_find(handle, &result);
    if (stream == NULL) return result;
    if (stream_is_default(stream))
        return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the NULL stream does not capture");
    Capture *capture = calloc(1, sizeof *capture);
    if (capture == NULL) abort();
    *capture = (Capture){.next = captures, .graph = add_graph(false), .mode = mode, .thread = pthread_self()};
    captures = capture;
    stream_capture(stream, capture);
    return CUDA_SUCCESS;
}

static void end_capture(Capture *capture) {
    Capture **place = &captures;
    while (*place != capture) place = &(*place)->next;
    *place = capture->next;
    free(capture);
}

static CUresult end(CUstream handle, void **graph) {
    CUresult result;
    Stream *stream = stream_find_capturing(handle, &result);
    if (stream == NULL) return result;
    Capture *capture = stream_captures(stream);
    if (graph == NULL || capture == NULL)
        return refuse(CUDA_ERROR_ILLEGAL_STATE, "the stream does not capture, or there is no place for the graph");
    *graph = NULL;
    if (capture->mode != MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
        return refuse(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "another thread has begun the capture");
    stream_capture(stream, NULL);
    if (capture->is_broken) {
        result = refuse(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture was broken");
        drop(capture->graph);
    } else *graph = capture->graph->handle;
    end_capture(capture);
    return result;
}

static CUresult is_capturing(CUstream handle, int *status) {
    CUresult result;
    Stream *stream = stream_find_capturing(handle, &result);
    if (stream == NULL) return result;
    if (status == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the status needs a place");
    Capture *capture = stream_captures(stream);
    *status = capture == NULL ? 0 : capture->is_broken ? 2 : 1;
    return CUDA_SUCCESS;
}

static CUresult exchange(int *mode) {
    if (mode == NULL || *mode < 0 || *mode >= MODE_COUNT)
        return refuse(CUDA_ERROR_INVALID_VALUE, "this is no mode of a thread");
    Mode before = thread_mode;
    thread_mode = (Mode)*mode;
    *mode = (int)before;
    return CUDA_SUCCESS;
}

static CUresult instantiate(void **executable, void *handle, unsigned long long flags) {
    CUresult result = CUDA_SUCCESS;
    if (executable == NULL || flags != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a graph is instantiated into a place, with flags 0");
    Graph *graph = find_graph(handle, false, &result);
    if (graph == NULL) return result;
    Graph *made = add_graph(true);
    for (Node *node = graph->first; node != NULL; node = node->next)
        add_node(made, node->work, node->state, node->size);
    *executable = made->handle;
    return CUDA_SUCCESS;
}

static CUresult launch(void *handle, CUstream stream_handle) {
    CUresult result;
    Stream *stream = stream_find(stream_handle, &result);
    Graph *graph = stream == NULL ? NULL : find_graph(handle, true, &result);
    if (graph == NULL) return result;
    if (graph->stream != NULL) stream_follow(stream, graph->stream, graph->point); // never twice at a time
    for (Node *node = graph->first; node != NULL; node = node->next) {
        result = node->work(stream, node->state);
        if (result == CUDA_SUCCESS) continue;
        context_poison(stream_context(stream), CUDA_ERROR_ILLEGAL_ADDRESS); // a device would find it when it runs
        return CUDA_SUCCESS;
    }
    graph->stream = stream;
    graph->point = stream_position(stream);
    return CUDA_SUCCESS;
}

static CUresult destroy(void *handle, bool is_executable) {
    CUresult result = CUDA_SUCCESS;
    Graph *graph = find_graph(handle, is_executable, &result);
    if (graph == NULL) return result;
    if (graph->stream != NULL && !stream_has_done(graph->stream, graph->point))
        return refuse(CUDA_ERROR_INVALID_VALUE, "the graph is under way");
    drop(graph);
    return CUDA_SUCCESS;
}

#define GRAPH_WORDS "\"graph\":%zu"

API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
    CALL(NEEDS_CONTEXT, begin(stream, (Mode)mode), stream, "\"mode\":%d", mode);
}
API CUresult cuStreamEndCapture(CUstream stream, void **graph) {
    CALL(NEEDS_CONTEXT, end(stream, graph), stream, GRAPH_WORDS, result_ == CUDA_SUCCESS ? (size_t)*graph : 0);
}
API CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    CALL(NEEDS_CONTEXT, is_capturing(stream, status), stream, "%s", "");
}
API CUresult cuThreadExchangeStreamCaptureMode(int *mode) { CALL(NEEDS_NOTHING, exchange(mode), NULL, "%s", ""); }
API CUresult cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    CALL(NEEDS_CONTEXT, instantiate(executable, graph, flags), NULL, GRAPH_WORDS, (size_t)graph);
}
API CUresult cuGraphLaunch(void *executable, CUstream stream) {
    CALL(NEEDS_CONTEXT, launch(executable, stream), stream, GRAPH_WORDS, (size_t)executable);
}
API CUresult cuGraphDestroy(void *graph) {
    CALL(NEEDS_INIT, destroy(graph, false), NULL, GRAPH_WORDS, (size_t)graph);
}
API CUresult cuGraphExecDestroy(void *executable) {
    CALL(NEEDS_INIT, destroy(executable, true), NULL, GRAPH_WORDS, (size_t)executable);
}
