/* Chained block keys of a whole prompt in one call: the optional native half of keys.py.
 *
 * Implements what the BLAKE3 specification calls keyed_hash for inputs of one chunk (at most 1024 bytes), which is
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

PyDoc_STRVAR(hash_blocks_doc,
             "hash_blocks(parent, tokens, block_size, /)\n--\n\n"
             "Keys of consecutive blocks, 16 bytes each, and the 32-byte state after the last one.\n\n"
             "parent: 32 bytes; tokens: whole blocks of little-endian int32; block_size: 1 to 256 tokens.\n"
             "Raises ValueError where one of these does not hold.");

static PyObject *
hash_blocks(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer parent, tokens;
    Py_ssize_t block_size;
    PyObject *keys = NULL, *result = NULL;

    if (!PyArg_ParseTuple(args, "y*y*n:hash_blocks", &parent, &tokens, &block_size))
        return NULL;
    if (parent.len != STATE_BYTES) {
        PyErr_Format(PyExc_ValueError, "parent has %zd bytes, not 32", parent.len);
    } else if (block_size < 1 || block_size > CHUNK_BYTES / TOKEN_BYTES) {
        PyErr_Format(PyExc_ValueError, "block_size %zd is not in 1..256", block_size);
    } else if (tokens.len % (block_size * TOKEN_BYTES)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are not whole blocks of %zd tokens", tokens.len, block_size);
    } else {
        Py_ssize_t block_bytes = block_size * TOKEN_BYTES, blocks = tokens.len / block_bytes;
        keys = PyBytes_FromStringAndSize(NULL, blocks * KEY_BYTES);
        if (keys != NULL) {
            uint8_t state[STATE_BYTES];
            uint8_t *out = (uint8_t *)PyBytes_AS_STRING(keys);
            PyThreadState *released = tokens.len >= GIL_RELEASE_BYTES ? PyEval_SaveThread() : NULL;
            memcpy(state, parent.buf, STATE_BYTES);
            hash_chain(state, out, tokens.buf, (size_t)blocks, (size_t)block_bytes);
            if (released != NULL)
                PyEval_RestoreThread(released);
            result = Py_BuildValue("(Ny#)", keys, (const char *)state, (Py_ssize_t)STATE_BYTES);
        }
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&tokens);
    return result;
}

static PyMethodDef methods[] = {
    {"hash_blocks", hash_blocks, METH_VARARGS, hash_blocks_doc},
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
    .m_name = "_native_blake3",
    .m_doc = "BLAKE3 chained over the blocks of a prompt; see keys.py.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native_blake3(void)
{
    return PyModuleDef_Init(&definition);
}
