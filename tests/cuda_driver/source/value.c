// Stream memory operations: a stream writes a value to memory, or waits until memory holds one.
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>

enum { GEQ = 0, EQ = 1, AND = 2, NOR = 3, FLUSH = 1 << 30 };
enum { NO_MEMORY_BARRIER = 1 };
enum { DEVICE_MAP = 2 };

typedef struct {
    Context *context;
    uintptr_t address;
    uint64_t value;
    uint64_t serials;
    unsigned bits, test;
} Value;

static CUresult check(uintptr_t address, unsigned bits, uint64_t *serials) {
    Side side;
    if (fault_strikes(FAULT_REFUSED_VALUES)) return refuse(CUDA_ERROR_NOT_SUPPORTED, "value refused by seed");
    HostRegion *host = host_region_at(address);
    if (address % (bits / 8) != 0)
        return refuse(CUDA_ERROR_INVALID_VALUE, "the address of a value of %u bits is not aligned", bits);
    CUresult result = range_check(address, bits / 8, true, "value", &side, serials);
    if (result != CUDA_SUCCESS) return result;
    if (side == SIDE_PAGEABLE || (host != NULL && !(host->flags & DEVICE_MAP)))
        return refuse(CUDA_ERROR_INVALID_VALUE,
                      "a value lies in device memory or in host memory registered with DEVICEMAP");
    return CUDA_SUCCESS;
}

// With the driver's lock held, so that device memory stays mapped; false poisons the context.
static bool is_there(Value *value) {
    if (range_serials(value->address, value->bits / 8) == value->serials) return true;
    context_poison(value->context, CUDA_ERROR_ILLEGAL_ADDRESS);
    refuse(CUDA_ERROR_ILLEGAL_ADDRESS, "the memory of a queued value at %#zx was freed or remapped",
           (size_t)value->address);
    return false;
}

static CUresult run_write(void *state, char *words, size_t room) {
    Value *value = state;
    if (!is_there(value)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (value->bits == 64) __atomic_store_n((uint64_t *)value->address, value->value, __ATOMIC_SEQ_CST);
    else __atomic_store_n((uint32_t *)value->address, (uint32_t)value->value, __ATOMIC_SEQ_CST);
    snprintf(words, room, "\"address\":%zu,\"value\":%llu", (size_t)value->address, (unsigned long long)value->value);
    return CUDA_SUCCESS;
}

static bool is_reached(void *state) {
    Value *value = state;
    if (!is_there(value)) return true;
    uint64_t now = value->bits == 64 ? __atomic_load_n((uint64_t *)value->address, __ATOMIC_SEQ_CST)
                                     : __atomic_load_n((uint32_t *)value->address, __ATOMIC_SEQ_CST);
    uint64_t all = value->bits == 64 ? UINT64_MAX : UINT32_MAX;
    switch (value->test) {
    case GEQ:
        return value->bits == 64 ? (int64_t)(now - value->value) >= 0 : (int32_t)(uint32_t)(now - value->value) >= 0;
    case EQ:
        return now == value->value;
    case AND:
        return (now & value->value) != 0;
    default:
        return (~(now | value->value) & all) != 0;
    }
}

static Operation *operation_of(const char *name, OperationKind kind, Value value) {
    Operation *operation = operation_new(name, kind);
    Value *state = malloc(sizeof *state);
    if (state == NULL) abort();
    *state = value;
    operation->state = state;
    operation->drop = free;
    return operation;
}

static CUresult write_value(CUstream handle, CUdeviceptr address, uint64_t number, unsigned bits, unsigned flags) {
    CUresult result;
    Value value = {.context = context_current(), .address = address, .value = number, .bits = bits};
    Stream *stream = stream_find(handle, &result);
    if (stream == NULL) return result;
    if (flags > NO_MEMORY_BARRIER) return refuse(CUDA_ERROR_INVALID_VALUE, "these flags are none of a write");
    result = check(address, bits, &value.serials);
    if (result != CUDA_SUCCESS) return result;
    Operation *operation = operation_of("write value", RUN_LOCKED, value);
    operation->run = run_write;
    stream_enqueue(stream, operation);
    if (flags == NO_MEMORY_BARRIER && (draw(DRAW_BARRIER, stream_serial(stream), stream_position(stream)) & 1))
        stream_swap_last(stream); // the flag lets the write become visible before a copy that was queued before it
    return CUDA_SUCCESS;
}

static CUresult wait_value(CUstream handle, CUdeviceptr address, uint64_t number, unsigned bits, unsigned flags) {
    CUresult result;
    Value value = {.context = context_current(), .address = address, .value = number, .bits = bits, .test = flags};
    Stream *stream = stream_find(handle, &result);
    if (stream == NULL) return result;
    if (flags & FLUSH) return refuse(CUDA_ERROR_NOT_SUPPORTED, "the device cannot flush remote writes");
    if (flags > NOR) return refuse(CUDA_ERROR_INVALID_VALUE, "these flags are none of a wait");
    result = check(address, bits, &value.serials);
    if (result != CUDA_SUCCESS) return result;
    Operation *operation = operation_of("wait value", WAIT_UNTIL, value);
    operation->is_over = is_reached;
    stream_enqueue(stream, operation);
    return CUDA_SUCCESS;
}

#define WORDS "\"address\":%llu,\"value\":%llu,\"flags\":%u", address, (unsigned long long)value, flags

API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    CALL(NEEDS_CONTEXT, write_value(stream, address, value, 32, flags), stream, WORDS);
}
API CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    CALL(NEEDS_CONTEXT, write_value(stream, address, value, 64, flags), stream, WORDS);
}
API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    CALL(NEEDS_CONTEXT, wait_value(stream, address, value, 32, flags), stream, WORDS);
}
API CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    CALL(NEEDS_CONTEXT, wait_value(stream, address, value, 64, flags), stream, WORDS);
}
