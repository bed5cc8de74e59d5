// Copies and fills. A copy reads its source when it runs and not when it is queued, unless the documents say that it may
// read earlier: then the seed decides. The copies of a batch run in an order that the seed decides.
#include "fake_cuda.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

// The kernel copies: an address that is gone is an error here, where memcpy would end the process.
CUresult move_bytes(uintptr_t destination, uintptr_t source, size_t size) {
    for (size_t done = 0; done < size;) {
        struct iovec from = {(void *)(source + done), size - done}, to = {(void *)(destination + done), size - done};
        ssize_t moved = process_vm_writev(getpid(), &from, 1, &to, 1, 0);
        if (moved < 0 && (errno == EPERM || errno == ENOSYS)) { // a sandbox that forbids the call
            memcpy((void *)(destination + done), (void *)(source + done), size - done);
            return CUDA_SUCCESS;
        }
        if (moved <= 0) return CUDA_ERROR_ILLEGAL_ADDRESS;
        done += (size_t)moved;
    }
    return CUDA_SUCCESS;
}

static CUresult fill_bytes(uintptr_t destination, unsigned char byte, size_t size) {
    unsigned char pattern[4096];
    CUresult result = CUDA_SUCCESS;
    memset(pattern, byte, sizeof pattern);
    for (size_t done = 0; done < size && result == CUDA_SUCCESS; done += sizeof pattern)
        result = move_bytes(destination + done, (uintptr_t)pattern,
                            size - done < sizeof pattern ? size - done : sizeof pattern);
    return result;
}

// Pageable memory may be registered while a copy with it is queued: no rule forbids it, and the bytes stay where they are.
static bool is_same_memory(uintptr_t address, size_t size, Side side, uint64_t serials) {
    return range_serials(address, size) == serials || (side == SIDE_PAGEABLE && host_region_at(address) != NULL);
}

static CUresult run_piece(const Batch *batch, const Piece *piece) {
    pthread_mutex_lock(&driver_lock);
    bool is_same = is_same_memory(piece->destination, piece->size, piece->to, piece->destination_serials) &&
                   (piece->staged != NULL || batch->is_fill ||
                    is_same_memory(piece->source, piece->size, piece->from, piece->source_serials));
    if (!is_same)
        refuse(CUDA_ERROR_ILLEGAL_ADDRESS,
               "memory of a queued copy from %#zx to %#zx was freed, remapped or unregistered", (size_t)piece->source,
               (size_t)piece->destination);
    bool reads_device = !batch->is_fill && piece->staged == NULL && piece->from == SIDE_DEVICE;
    bool is_bad = is_same && reads_device && range_is_bad(piece->source, piece->size);
    pthread_mutex_unlock(&driver_lock);
    if (!is_same) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (is_bad) return CUDA_ERROR_ECC_UNCORRECTABLE;
    if (batch->is_fill) return fill_bytes(piece->destination, batch->byte, piece->size);
    return move_bytes(piece->destination, piece->staged == NULL ? piece->source : (uintptr_t)piece->staged,
                      piece->size);
}

static CUresult run_batch(void *state, char *words, size_t room) {
    Batch *batch = state;
    CUresult result = CUDA_SUCCESS;
    size_t bytes = 0, to_device = 0, to_host = 0;
    for (size_t last = batch->count; last > 1; last--) { // Fisher and Yates
        size_t other = draw(DRAW_SHUFFLE, batch->stream << 32 | batch->position, last) % last;
        Piece piece = batch->pieces[last - 1];
        batch->pieces[last - 1] = batch->pieces[other];
        batch->pieces[other] = piece;
    }
    for (size_t each = 0; each < batch->count && result == CUDA_SUCCESS; each++) {
        result = run_piece(batch, &batch->pieces[each]);
        const Piece *piece = &batch->pieces[each];
        bytes += piece->size;
        if (piece->to == SIDE_DEVICE && piece->from != SIDE_DEVICE) to_device += piece->size;
        if (piece->to != SIDE_DEVICE && piece->from == SIDE_DEVICE) to_host += piece->size;
    }
    snprintf(words, room, "\"count\":%zu,\"bytes\":%zu,\"to_device\":%zu,\"to_host\":%zu", batch->count, bytes, to_device,
             to_host);
    return result;
}

void batch_drop(void *state) {
    Batch *batch = state;
    for (size_t each = 0; each < batch->count; each++) free(batch->pieces[each].staged);
    free(batch);
}

Batch *batch_new(size_t count) {
    Batch *batch = calloc(1, sizeof *batch + count * sizeof *batch->pieces);
    if (batch == NULL) abort();
    batch->count = count;
    return batch;
}

CUresult piece_check(Piece *piece, bool is_fill) {
    CUresult result =
        range_check(piece->destination, piece->size, true, "destination", &piece->to, &piece->destination_serials);
    if (result == CUDA_SUCCESS && !is_fill)
        result = range_check(piece->source, piece->size, false, "source", &piece->from, &piece->source_serials);
    return result;
}

CUresult piece_stage(Piece *piece) {
    piece->staged = malloc(piece->size);
    if (piece->staged == NULL) abort();
    CUresult result = move_bytes((uintptr_t)piece->staged, piece->source, piece->size);
    if (result != CUDA_SUCCESS) return refuse(CUDA_ERROR_INVALID_VALUE, "the source of a copy cannot be read");
    return result;
}

void batch_enqueue(Stream *stream, Batch *batch) {
    Operation *operation = operation_new(batch->is_fill ? "fill" : "copy", RUN_FREE);
    batch->stream = stream_serial(stream);
    batch->position = stream_position(stream);
    operation->run = run_batch;
    operation->drop = batch_drop;
    operation->state = batch;
    operation->may_fail = true;
    stream_enqueue(stream, operation);
}

typedef enum { ANY_SIDE, TO_DEVICE, TO_HOST, ON_DEVICE } Direction;

static CUresult check_direction(const Piece *piece, Direction direction) {
    bool to = piece->to == SIDE_DEVICE, from = piece->from == SIDE_DEVICE;
    bool fits = direction == ANY_SIDE || (direction == TO_DEVICE && to && !from) ||
                (direction == TO_HOST && !to && from) || (direction == ON_DEVICE && to && from);
    return fits ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_VALUE, "the call's direction is not that of its addresses");
}

// What is left of a copy or a fill in a graph: addresses, which are looked at when it is launched.
typedef struct {
    CUdeviceptr destination, source;
    size_t size;
    unsigned char byte;
} Captured;

static CUresult copy_captured(Stream *stream, void *state) {
    const Captured *captured = state;
    Batch *batch = batch_new(1);
    batch->pieces[0] =
        (Piece){.destination = captured->destination, .source = captured->source, .size = captured->size};
    CUresult result = piece_check(&batch->pieces[0], false);
    if (result == CUDA_SUCCESS) batch_enqueue(stream, batch);
    else batch_drop(batch);
    return result;
}

static CUresult capture_copy(Stream *stream, const Piece *piece) {
    if (piece->from == SIDE_PAGEABLE || piece->to == SIDE_PAGEABLE)
        return capture_break(stream_captures(stream), "a copy with pageable memory may wait for its stream");
    Captured captured = {piece->destination, piece->source, piece->size, 0};
    capture_add(stream_captures(stream), copy_captured, &captured, sizeof captured);
    return CUDA_SUCCESS;
}

// What the section "API synchronization behavior" says of memcpy: `is_async` is the suffix of the call's name.
static CUresult copy(CUdeviceptr destination, CUdeviceptr source, size_t size, CUstream handle, bool is_async,
                     Direction direction) {
    CUresult result;
    Stream *stream = is_async ? stream_find_capturing(handle, &result) : stream_find(handle, &result);
    if (stream == NULL || size == 0) return result;
    Batch *batch = batch_new(1);
    Piece *piece = &batch->pieces[0];
    *piece = (Piece){.destination = destination, .source = source, .size = size};
    result = piece_check(piece, false);
    if (result == CUDA_SUCCESS && stream_captures(stream) != NULL) {
        result = check_direction(piece, direction);
        if (result == CUDA_SUCCESS) result = capture_copy(stream, piece);
        batch_drop(batch);
        return result;
    }
    if (result == CUDA_SUCCESS) result = check_direction(piece, direction);
    bool is_pageable = piece->from == SIDE_PAGEABLE || piece->to == SIDE_PAGEABLE;
    // With pageable memory an asynchronous copy may wait for the stream, and may not.
    bool waits =
        !is_async || (is_pageable && (draw(DRAW_PAGEABLE, stream_serial(stream), stream_position(stream)) & 1));
    if (result == CUDA_SUCCESS && waits && piece->from == SIDE_PAGEABLE && piece->to == SIDE_DEVICE) {
        result =
            stream_finish(stream, stream_position(stream)); // then the source is staged, and the rest is not waited for
        if (result == CUDA_SUCCESS) result = piece_stage(piece);
        waits = false;
    }
    if (result != CUDA_SUCCESS) {
        batch_drop(batch);
        return result;
    }
    waits = waits && !(piece->from == SIDE_DEVICE && piece->to == SIDE_DEVICE);
    batch_enqueue(stream, batch);
    return waits ? stream_finish(stream, stream_position(stream)) : CUDA_SUCCESS;
}

static CUresult fill_captured(Stream *stream, void *state) {
    const Captured *captured = state;
    Batch *batch = batch_new(1);
    batch->is_fill = true;
    batch->byte = captured->byte;
    batch->pieces[0] = (Piece){.destination = captured->destination, .size = captured->size};
    CUresult result = piece_check(&batch->pieces[0], true);
    if (result == CUDA_SUCCESS) batch_enqueue(stream, batch);
    else batch_drop(batch);
    return result;
}

static CUresult fill(CUdeviceptr destination, unsigned char byte, size_t size, CUstream handle) {
    CUresult result;
    Stream *stream = stream_find_capturing(handle, &result);
    if (stream == NULL || size == 0) return result;
    Captured captured = {destination, 0, size, byte};
    if (stream_captures(stream) == NULL) return fill_captured(stream, &captured);
    capture_add(stream_captures(stream), fill_captured, &captured, sizeof captured);
    return CUDA_SUCCESS;
}

// --- calls ---

#define COPY_CALL(to, from, stream, is_async, direction)                                                               \
    CALL(NEEDS_CONTEXT,                                                                                                \
         copy((CUdeviceptr)(uintptr_t)(to), (CUdeviceptr)(uintptr_t)(from), size, stream, is_async, direction),        \
         stream, "\"destination\":%zu,\"source\":%zu,\"bytes\":%zu", (size_t)(uintptr_t)(to),                          \
         (size_t)(uintptr_t)(from), size)

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) { COPY_CALL(to, from, NULL, false, ANY_SIDE); }
API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    COPY_CALL(to, from, stream, true, ANY_SIDE);
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    COPY_CALL(to, from, NULL, false, TO_DEVICE);
}
API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) { COPY_CALL(to, from, NULL, false, TO_HOST); }
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size) {
    COPY_CALL(to, from, NULL, false, ON_DEVICE);
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream) {
    COPY_CALL(to, from, stream, true, TO_DEVICE);
}
API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream) {
    COPY_CALL(to, from, stream, true, TO_HOST);
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    COPY_CALL(to, from, stream, true, ON_DEVICE);
}
API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char byte, size_t size) {
    CALL(NEEDS_CONTEXT, fill(to, byte, size, NULL), NULL, "\"destination\":%llu,\"bytes\":%zu", to, size);
}
API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t size, CUstream stream) {
    CALL(NEEDS_CONTEXT, fill(to, byte, size, stream), stream, "\"destination\":%llu,\"bytes\":%zu", to, size);
}
