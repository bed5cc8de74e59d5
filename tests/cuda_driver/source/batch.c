// Copies of many pieces by one call: batches, and rows at a pitch. Pieces of a call run in an order that the seed decides.
#include "fake_cuda.h"

#include <stdint.h>
#include <stdlib.h>

enum { ORDER_STREAM = 1, ORDER_DURING_CALL = 2, ORDER_ANY = 3 };

typedef struct {
    unsigned order;
    struct {
        unsigned type;
        int id;
    } source_hint, destination_hint;
    unsigned flags;
} Attributes;

typedef struct {
    CUdeviceptr *destinations, *sources;
    size_t *sizes, count;
    Attributes *attributes;
    size_t *indices, attribute_count;
} BatchArguments;

static CUresult check_attributes(const BatchArguments *all) {
    if (all->destinations == NULL || all->sources == NULL || all->sizes == NULL || all->count == 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a batch has at least one copy");
    if (all->attributes == NULL || all->indices == NULL || all->attribute_count == 0 ||
        all->attribute_count > all->count)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a batch has between one attribute and as many as copies");
    for (size_t each = 0; each < all->attribute_count; each++) {
        if (all->attributes[each].order < ORDER_STREAM || all->attributes[each].order > ORDER_ANY)
            return refuse(CUDA_ERROR_INVALID_VALUE, "attribute %zu has no srcAccessOrder", each);
        if (all->attributes[each].flags > 1)
            return refuse(CUDA_ERROR_INVALID_VALUE, "attribute %zu has unknown flags", each);
        if (each == 0 ? all->indices[0] != 0
                      : all->indices[each] <= all->indices[each - 1] || all->indices[each] >= all->count)
            return refuse(CUDA_ERROR_INVALID_VALUE,
                          "the indices of attributes begin at 0, go up and end below the count");
    }
    return CUDA_SUCCESS;
}

static int by_destination(const void *left, const void *right) {
    uintptr_t one = (*(Piece *const *)left)->destination, other = (*(Piece *const *)right)->destination;
    return (one > other) - (one < other);
}

// Copies that depend on one another have no defined result.
static CUresult check_independent(Batch *batch) {
    CUresult result = CUDA_SUCCESS;
    Piece **sorted = malloc(batch->count * sizeof(Piece *));
    if (sorted == NULL) abort();
    for (size_t each = 0; each < batch->count; each++) sorted[each] = &batch->pieces[each];
    qsort(sorted, batch->count, sizeof *sorted, by_destination);
    for (size_t each = 1; each < batch->count && result == CUDA_SUCCESS; each++)
        if (sorted[each - 1]->destination + sorted[each - 1]->size > sorted[each]->destination)
            result = refuse(CUDA_ERROR_INVALID_VALUE, "two copies of a batch write to %#zx",
                            (size_t)sorted[each]->destination);
    for (size_t each = 0; each < batch->count && result == CUDA_SUCCESS; each++) {
        uintptr_t source = batch->pieces[each].source;
        size_t low = 0, high = batch->count; // the first destination that ends behind the source's start
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (sorted[middle]->destination + sorted[middle]->size <= source) low = middle + 1;
            else high = middle;
        }
        if (low < batch->count && sorted[low]->destination < source + batch->pieces[each].size)
            result = refuse(CUDA_ERROR_INVALID_VALUE, "a copy of a batch reads at %#zx what the batch writes",
                            (size_t)source);
    }
    free(sorted);
    return result;
}

// ANY may read the source before the work that is queued now, and as late as the copy runs: the seed decides.
static bool reads_at_once(unsigned order, Stream *stream, size_t index) {
    return order == ORDER_DURING_CALL ||
           (order == ORDER_ANY &&
            (draw(DRAW_ANY_ORDER, stream_serial(stream) << 32 | stream_position(stream), index) & 1));
}

static CUresult fill_pieces(Batch *batch, const BatchArguments *all, Stream *stream, size_t *failed) {
    CUresult result = CUDA_SUCCESS;
    for (size_t each = 0, attribute = 0; each < all->count; each++) {
        Piece *piece = &batch->pieces[each];
        if (attribute + 1 < all->attribute_count && all->indices[attribute + 1] == each) attribute++;
        *piece =
            (Piece){.destination = all->destinations[each], .source = all->sources[each], .size = all->sizes[each]};
        result = piece_check(piece, false);
        if (result == CUDA_SUCCESS && reads_at_once(all->attributes[attribute].order, stream, each))
            result = piece_stage(piece);
        if (result != CUDA_SUCCESS) {
            *failed = each;
            return result;
        }
    }
    return check_independent(batch);
}

static CUresult copy_batch(const BatchArguments *all, size_t *failed, CUstream handle) {
    size_t unused;
    CUresult result;
    if (failed == NULL) failed = &unused;
    *failed = SIZE_MAX; // not one copy in particular
    if (handle == NULL || (uintptr_t)handle == 1)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a batch cannot run on the NULL or legacy stream");
    Stream *stream = stream_find(handle, &result);
    if (stream == NULL) return result;
    result = check_attributes(all);
    if (result != CUDA_SUCCESS) return result;
    Batch *batch = batch_new(all->count);
    result = fill_pieces(batch, all, stream, failed);
    if (result == CUDA_SUCCESS) batch_enqueue(stream, batch);
    else batch_drop(batch);
    return result;
}

static size_t total(const size_t *sizes, size_t count) {
    size_t bytes = 0;
    for (size_t each = 0; sizes != NULL && each < count; each++) bytes += sizes[each];
    return bytes;
}

#define BATCH_WORDS "\"count\":%zu,\"bytes\":%zu,\"attributes\":%zu,\"abi\":%d"

API CUresult cuMemcpyBatchAsync(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
                                Attributes *attributes, size_t *indices, size_t attribute_count, size_t *failed,
                                CUstream stream) {
    BatchArguments all = {destinations, sources, sizes, count, attributes, indices, attribute_count};
    CALL(NEEDS_CONTEXT, copy_batch(&all, failed, stream), stream, BATCH_WORDS, count, total(sizes, count),
         attribute_count, 12080);
}
API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
                                   Attributes *attributes, size_t *indices, size_t attribute_count, CUstream stream) {
    BatchArguments all = {destinations, sources, sizes, count, attributes, indices, attribute_count};
    CALL(NEEDS_CONTEXT, copy_batch(&all, NULL, stream), stream, BATCH_WORDS, count, total(sizes, count),
         attribute_count, 13000);
}

// --- rows ---

enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_ARRAY = 3, MEMORY_UNIFIED = 4 };

typedef struct {
    size_t x, y, z, lod;
    unsigned type;
    const void *host;
    CUdeviceptr device;
    void *array, *reserved;
    size_t pitch, height; // bytes between lines, lines between planes
} RowsSide;

typedef struct {
    RowsSide source, destination;
    size_t width, height, depth; // bytes, lines, planes
} Rows;

static CUresult check_side(const RowsSide *side, const Rows *rows, uintptr_t *address) {
    if (side->type != MEMORY_HOST && side->type != MEMORY_DEVICE && side->type != MEMORY_UNIFIED)
        return refuse(CUDA_ERROR_INVALID_VALUE, "this driver has no arrays, and memory type %u is none", side->type);
    if (side->x + side->y + side->z + side->lod != 0 || side->reserved != NULL)
        return refuse(CUDA_ERROR_INVALID_VALUE, "this driver copies from the start of memory");
    if (side->pitch < rows->width || side->height < rows->height)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a pitch of %zu or a height of %zu is less than what is copied",
                      side->pitch, side->height);
    if (side->pitch > MAX_PITCH)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a pitch of %zu is more than the device allows", side->pitch);
    *address = side->type == MEMORY_HOST ? (uintptr_t)side->host : (uintptr_t)side->device;
    return CUDA_SUCCESS;
}

static CUresult check_kind(const RowsSide *side, Side found) {
    bool is_right = side->type == MEMORY_UNIFIED || (side->type == MEMORY_DEVICE) == (found == SIDE_DEVICE);
    return is_right ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_VALUE, "the memory is not of the type that is given");
}

// From the first byte to the last one it is one memory: a device refuses rows in several allocations, or with nothing
// mapped in between. Mappings side by side are one memory.
static CUresult check_hull(const RowsSide *side, const Rows *rows, uintptr_t address, bool is_written) {
    Side found;
    uint64_t serials;
    size_t lines = (rows->depth - 1) * side->height + rows->height - 1;
    return range_check(address, lines * side->pitch + rows->width, is_written, "rows", &found, &serials);
}

static CUresult fill_rows(Batch *batch, const Rows *rows) {
    uintptr_t to, from;
    CUresult result = check_side(&rows->destination, rows, &to);
    if (result == CUDA_SUCCESS) result = check_side(&rows->source, rows, &from);
    if (result == CUDA_SUCCESS) result = check_hull(&rows->destination, rows, to, true);
    if (result == CUDA_SUCCESS) result = check_hull(&rows->source, rows, from, false);
    for (size_t each = 0; each < batch->count && result == CUDA_SUCCESS; each++) {
        size_t plane = each / rows->height, line = each % rows->height;
        Piece *piece = &batch->pieces[each];
        *piece = (Piece){
            .destination = to + (plane * rows->destination.height + line) * rows->destination.pitch,
            .source = from + (plane * rows->source.height + line) * rows->source.pitch,
            .size = rows->width,
        };
        result = piece_check(piece, false);
        if (result == CUDA_SUCCESS) result = check_kind(&rows->destination, piece->to);
        if (result == CUDA_SUCCESS) result = check_kind(&rows->source, piece->from);
    }
    return result;
}

static bool is_pageable(const Batch *batch) {
    for (size_t each = 0; each < batch->count; each++)
        if (batch->pieces[each].from == SIDE_PAGEABLE || batch->pieces[each].to == SIDE_PAGEABLE) return true;
    return false;
}

// As one copy with pageable memory: it may wait for its stream, and may not.
static CUresult copy_rows(const Rows *rows, CUstream handle) {
    CUresult result;
    Stream *stream = stream_find(handle, &result);
    if (stream == NULL) return result;
    if (rows == NULL) return refuse(CUDA_ERROR_INVALID_VALUE, "the copy has no parameters");
    if (rows->width == 0 || rows->height == 0 || rows->depth == 0) return CUDA_SUCCESS;
    Batch *batch = batch_new(rows->height * rows->depth);
    result = fill_rows(batch, rows);
    if (result != CUDA_SUCCESS) {
        batch_drop(batch);
        return result;
    }
    bool waits = is_pageable(batch) && (draw(DRAW_PAGEABLE, stream_serial(stream), stream_position(stream)) & 1);
    batch_enqueue(stream, batch);
    return waits ? stream_finish(stream, stream_position(stream)) : CUDA_SUCCESS;
}

API CUresult cuMemcpy3DAsync_v2(const Rows *rows, CUstream stream) {
    static const Rows none;
    const Rows *told = rows == NULL ? &none : rows;
    CALL(NEEDS_CONTEXT, copy_rows(rows, stream), stream, "\"width\":%zu,\"height\":%zu,\"depth\":%zu", told->width,
         told->height, told->depth);
}
