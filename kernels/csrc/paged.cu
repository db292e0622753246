// Gather and scatter between paged KV and packed records, for any layout, in one launch.
//
// A table of segments says where the pieces of a block lie; int64 [segments][4]:
//
//     address of the piece of block 0, bytes from block to block, bytes of the piece, offset in record
//
// Grid: x = which of the n records, y = which segment, z = which slice of it. A slice is a multiple
// of 16 bytes, so cutting never spoils alignment. No torch or CUDA header is needed, and the tests
// compile this very file for the host with a small shim (tests/kernels/shim.cpp).

typedef long long i64;
typedef unsigned char byte;

// Bytes a block of threads copies: 4 accesses of 16 bytes for each of 256 threads.
static constexpr i64 SLICE = 16384;

template <typename Word>
__device__ __forceinline__ void copy_words(byte* to, const byte* from, i64 nbytes, i64 lane,
                                           i64 lanes) {
    const i64 words = nbytes / (i64)sizeof(Word);
    for (i64 i = lane; i < words; i += lanes)
        reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
    // Fewer than sizeof(Word) bytes are left over.
    const i64 done = words * (i64)sizeof(Word);
    if (lane < nbytes - done) to[done + lane] = from[done + lane];
}

__device__ __forceinline__ void copy_bytes(byte* to, const byte* from, i64 nbytes) {
    const i64 lane = threadIdx.x, lanes = blockDim.x;
    const unsigned long long both = (unsigned long long)to | (unsigned long long)from;
    if ((both & 15) == 0)
        copy_words<uint4>(to, from, nbytes, lane, lanes);
    else if ((both & 3) == 0)
        copy_words<unsigned int>(to, from, nbytes, lane, lanes);
    else
        copy_words<byte>(to, from, nbytes, lane, lanes);
}

template <bool GATHER>
__device__ __forceinline__ void move_piece(const i64* segments, const i64* blocks, const i64* rows,
                                           byte* packed, i64 row_stride) {
    const i64* segment = segments + 4 * (i64)blockIdx.y;
    const i64 start = SLICE * (i64)blockIdx.z;
    if (start >= segment[2]) return;  // shorter than the longest segment of this launch
    const i64 left = segment[2] - start;
    const i64 nbytes = left < SLICE ? left : SLICE;
    const i64 block = blocks[blockIdx.x], row = rows[blockIdx.x];
    byte* page = reinterpret_cast<byte*>(segment[0] + block * segment[1] + start);
    byte* record = packed + row * row_stride + segment[3] + start;
    if (GATHER)
        copy_bytes(record, page, nbytes);
    else
        copy_bytes(page, record, nbytes);
}

extern "C" __global__ void kvstrata_gather(const i64* segments, const i64* blocks, const i64* rows,
                                           byte* packed, i64 row_stride) {
    move_piece<true>(segments, blocks, rows, packed, row_stride);
}

extern "C" __global__ void kvstrata_scatter(const i64* segments, const i64* blocks, const i64* rows,
                                            byte* packed, i64 row_stride) {
    move_piece<false>(segments, blocks, rows, packed, row_stride);
}
