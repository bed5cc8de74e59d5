/* Chained block keys of a whole prompt in one call: the optional native half of keys.py, for both algorithms.
 *
 * BLAKE3: what the BLAKE3 specification calls keyed_hash for inputs of one chunk (at most 1024 bytes), which is
 * all that a block of up to 256 tokens needs. Every block is keyed by the 32-byte digest of the block before it, so
 * blocks cannot be hashed side by side; what can be is the four columns of one compression, held here as vectors.
 * The vectors are those of GCC and Clang, without intrinsics: any target of either compiles this file.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvcached runs on little-endian machines: tokens and message words are read as they lie in memory"
#endif

enum { STATE_BYTES = 32, KEY_BYTES = 16, PIECE_BYTES = 64, CHUNK_BYTES = 1024, TOKEN_BYTES = 4 };
enum { CHUNK_START = 1, CHUNK_END = 2, ROOT = 8, KEYED_HASH = 16 };

/* Below this a call is over in some 20 us, and giving the GIL away could cost a whole switch interval to get back. */
enum { GIL_RELEASE_BYTES = 16 * 1024 };

typedef uint32_t row __attribute__((vector_size(16)));

/* Which message word each step of a round takes: the published permutation, applied once more per round. */
static const uint8_t SCHEDULE[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

#define ROTATE_RIGHT(words, bits) (((words) >> (bits)) | ((words) << (32 - (bits))))
#define LANES(v, i, j, k, l) ((row){v[i], v[j], v[k], v[l]})
#define WORDS(r, i, j, k, l) \
    ((row){m[SCHEDULE[r][i]], m[SCHEDULE[r][j]], m[SCHEDULE[r][k]], m[SCHEDULE[r][l]]})

/* Half of the quarter-round function, on all four columns at once. */
#define HALF_STEP(words, d_bits, b_bits) \
    a += words;                          \
    a += b;                              \
    d = ROTATE_RIGHT(d ^ a, d_bits);     \
    c += d;                              \
    b = ROTATE_RIGHT(b ^ c, b_bits);

/* Columns, then diagonals. Rows a, c and d are turned instead of b, c and d, since the chain of dependencies runs
 * through b; the message words of the diagonals are taken in the same turned order. */
#define ROUND(r)                              \
    HALF_STEP(WORDS(r, 0, 2, 4, 6), 16, 12)   \
    HALF_STEP(WORDS(r, 1, 3, 5, 7), 8, 7)     \
    a = LANES(a, 3, 0, 1, 2);                 \
    c = LANES(c, 1, 2, 3, 0);                 \
    d = LANES(d, 2, 3, 0, 1);                 \
    HALF_STEP(WORDS(r, 14, 8, 10, 12), 16, 12) \
    HALF_STEP(WORDS(r, 15, 9, 11, 13), 8, 7)  \
    a = LANES(a, 1, 2, 3, 0);                 \
    c = LANES(c, 3, 0, 1, 2);                 \
    d = LANES(d, 2, 3, 0, 1);

/* Inlined into each variant of the loop over blocks, so that each is compiled for its own instruction set. */
#define INLINE static inline __attribute__((always_inline))

/* One compression: `state` becomes the chaining value after 64 bytes of message, of which `length` are not padding. */
INLINE void
compress(uint8_t state[STATE_BYTES], const uint8_t message[PIECE_BYTES], uint32_t length, uint32_t flags)
{
    uint32_t m[16];
    row a, b;
    row c = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A};
    row d = {0, 0, length, flags}; /* the chunk counter stays 0: there is one chunk */

    memcpy(m, message, sizeof m);
    memcpy(&a, state, sizeof a);
    memcpy(&b, state + sizeof a, sizeof b);
    ROUND(0) ROUND(1) ROUND(2) ROUND(3) ROUND(4) ROUND(5) ROUND(6)
    a ^= c;
    b ^= d;
    memcpy(state, &a, sizeof a);
    memcpy(state + sizeof a, &b, sizeof b);
}

/* `state` (the key) becomes the 32-byte digest of one block's message of `size` bytes, 4 <= size <= 1024. */
INLINE void
hash_block(uint8_t state[STATE_BYTES], const uint8_t *message, size_t size)
{
    uint32_t flags = KEYED_HASH | CHUNK_START;
    for (; size > PIECE_BYTES; size -= PIECE_BYTES, message += PIECE_BYTES) {
        compress(state, message, PIECE_BYTES, flags);
        flags = KEYED_HASH;
    }
    flags |= CHUNK_END | ROOT;
    if (size == PIECE_BYTES) {
        compress(state, message, PIECE_BYTES, flags);
    } else {
        uint8_t padded[PIECE_BYTES] = {0};
        memcpy(padded, message, size);
        compress(state, padded, (uint32_t)size, flags);
    }
}

INLINE void
hash_each(uint8_t state[STATE_BYTES], uint8_t *keys, const uint8_t *tokens, size_t blocks, size_t block_bytes)
{
    for (size_t i = 0; i < blocks; i++) {
        hash_block(state, tokens + i * block_bytes, block_bytes);
        memcpy(keys + i * KEY_BYTES, state, KEY_BYTES);
    }
}

#ifdef __x86_64__
/* AVX-512VL rotates four words in one instruction where SSE2 takes three: a third less time. */
__attribute__((target("avx512vl"))) static void
hash_each_avx512(uint8_t state[STATE_BYTES], uint8_t *keys, const uint8_t *tokens, size_t blocks, size_t block_bytes)
{
    hash_each(state, keys, tokens, blocks, block_bytes);
}
#endif

static void
hash_chain(uint8_t state[STATE_BYTES], uint8_t *keys, const uint8_t *tokens, size_t blocks, size_t block_bytes)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512vl")) {
        hash_each_avx512(state, keys, tokens, blocks, block_bytes);
        return;
    }
#endif
    hash_each(state, keys, tokens, blocks, block_bytes);
}

/* --- XXH3, 128 bits, seed 0, of 17 to 240 bytes ------------------------------------------------------------------ */

typedef struct { uint64_t low, high; } pair;

enum { XXH3_SIZE_MAX = 240, XXH3_SHORT_MAX = 128, XXH3_MID_ROUNDS = 4, XXH3_MID_OFFSET = 3, XXH3_LAST_OFFSET = 103 };

static const uint64_t PRIME_1 = 0x9E3779B185EBCA87, PRIME_2 = 0xC2B2AE3D27D4EB4F, PRIME_4 = 0x85EBCA77C2B2AE63;

/* The default secret of the algorithm. */
static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t
read64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t
mix16(const uint8_t *input, const uint8_t *secret)
{
    unsigned __int128 product =
        (unsigned __int128)(read64(input) ^ read64(secret)) * (read64(input + 8) ^ read64(secret + 8));
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline pair
mix32(pair sum, const uint8_t *one, const uint8_t *other, const uint8_t *secret)
{
    sum.low += mix16(one, secret);
    sum.low ^= read64(other) + read64(other + 8);
    sum.high += mix16(other, secret + 16);
    sum.high ^= read64(one) + read64(one + 8);
    return sum;
}

static inline uint64_t
avalanche(uint64_t value)
{
    value ^= value >> 37;
    value *= 0x165667919E3779F9;
    return value ^ (value >> 32);
}

/* The canonical digest, its high half first and big-endian, of 17 to 240 bytes. */
static inline void
xxh3_digest(uint8_t digest[KEY_BYTES], const uint8_t *input, size_t size)
{
    pair sum = {size * PRIME_1, 0};
    if (size <= XXH3_SHORT_MAX) {
        for (size_t inner = (size - 1) / 32; inner > 0; inner--)
            sum = mix32(sum, input + 16 * inner, input + size - 16 * (inner + 1), SECRET + 32 * inner);
        sum = mix32(sum, input, input + size - 16, SECRET);
    } else {
        size_t rounds = size / 32;
        for (size_t i = 0; i < XXH3_MID_ROUNDS; i++)
            sum = mix32(sum, input + 32 * i, input + 32 * i + 16, SECRET + 32 * i);
        sum.low = avalanche(sum.low);
        sum.high = avalanche(sum.high);
        for (size_t i = XXH3_MID_ROUNDS; i < rounds; i++)
            sum = mix32(sum, input + 32 * i, input + 32 * i + 16, SECRET + XXH3_MID_OFFSET + 32 * (i - XXH3_MID_ROUNDS));
        sum = mix32(sum, input + size - 16, input + size - 32, SECRET + XXH3_LAST_OFFSET);
    }
    uint64_t low = avalanche(sum.low + sum.high);
    uint64_t high = -avalanche(sum.low * PRIME_1 + sum.high * PRIME_4 + size * PRIME_2);
    low = __builtin_bswap64(low);
    high = __builtin_bswap64(high);
    memcpy(digest, &high, sizeof high);
    memcpy(digest + sizeof high, &low, sizeof low);
}

static void
xxh3_chain(uint8_t state[STATE_BYTES], uint8_t *keys, const uint8_t *tokens, size_t blocks, size_t block_bytes)
{
    uint8_t message[XXH3_SIZE_MAX];
    memcpy(message, state, KEY_BYTES);
    for (size_t i = 0; i < blocks; i++) {
        memcpy(message + KEY_BYTES, tokens + i * block_bytes, block_bytes);
        xxh3_digest(message, message, KEY_BYTES + block_bytes);
        memcpy(keys + i * KEY_BYTES, message, KEY_BYTES);
    }
    memcpy(state, message, KEY_BYTES);
}

/* --- the module -------------------------------------------------------------------------------------------------- */

typedef void chain(uint8_t state[STATE_BYTES], uint8_t *keys, const uint8_t *tokens, size_t blocks, size_t block_bytes);

/* Both functions: an algorithm differs in its chain, the bytes of its state, and the largest block. */
static PyObject *
hash_blocks(PyObject *args, const char *format, chain *hash, Py_ssize_t state_bytes, Py_ssize_t block_size_max)
{
    Py_buffer parent, tokens;
    Py_ssize_t block_size;
    PyObject *keys = NULL, *result = NULL;

    if (!PyArg_ParseTuple(args, format, &parent, &tokens, &block_size))
        return NULL;
    if (parent.len != state_bytes) {
        PyErr_Format(PyExc_ValueError, "parent has %zd bytes, not %zd", parent.len, state_bytes);
    } else if (block_size < 1 || block_size > block_size_max) {
        PyErr_Format(PyExc_ValueError, "block_size %zd is not in 1..%zd", block_size, block_size_max);
    } else if (tokens.len % (block_size * TOKEN_BYTES)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are not whole blocks of %zd tokens", tokens.len, block_size);
    } else {
        Py_ssize_t block_bytes = block_size * TOKEN_BYTES, blocks = tokens.len / block_bytes;
        keys = PyBytes_FromStringAndSize(NULL, blocks * KEY_BYTES);
        if (keys != NULL) {
            uint8_t state[STATE_BYTES];
            uint8_t *out = (uint8_t *)PyBytes_AS_STRING(keys);
            PyThreadState *released = tokens.len >= GIL_RELEASE_BYTES ? PyEval_SaveThread() : NULL;
            memcpy(state, parent.buf, (size_t)state_bytes);
            hash(state, out, tokens.buf, (size_t)blocks, (size_t)block_bytes);
            if (released != NULL)
                PyEval_RestoreThread(released);
            result = Py_BuildValue("(Ny#)", keys, (const char *)state, state_bytes);
        }
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&tokens);
    return result;
}

PyDoc_STRVAR(blake3_blocks_doc,
             "blake3_blocks(parent, tokens, block_size, /)\n--\n\n"
             "Keys of consecutive blocks, 16 bytes each, and the 32-byte state after the last one.\n\n"
             "parent: 32 bytes; tokens: whole blocks of little-endian int32; block_size: 1 to 256 tokens.\n"
             "Raises ValueError where one of these does not hold.");

static PyObject *
blake3_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    return hash_blocks(args, "y*y*n:blake3_blocks", hash_chain, STATE_BYTES, CHUNK_BYTES / TOKEN_BYTES);
}

PyDoc_STRVAR(xxh3_blocks_doc,
             "xxh3_blocks(parent, tokens, block_size, /)\n--\n\n"
             "As blake3_blocks, with a parent and a state of 16 bytes, and blocks of 1 to 56 tokens.");

static PyObject *
xxh3_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    return hash_blocks(args, "y*y*n:xxh3_blocks", xxh3_chain, KEY_BYTES, (XXH3_SIZE_MAX - KEY_BYTES) / TOKEN_BYTES);
}

static PyMethodDef methods[] = {
    {"blake3_blocks", blake3_blocks, METH_VARARGS, blake3_blocks_doc},
    {"xxh3_blocks", xxh3_blocks, METH_VARARGS, xxh3_blocks_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native_keys",
    .m_doc = "Keys of all blocks of a prompt; see keys.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native_keys(void)
{
    return PyModuleDef_Init(&definition);
}
