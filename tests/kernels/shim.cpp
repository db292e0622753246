// Runs csrc/paged.cu on the CPU: one "thread" after the other, over the whole grid.
// PAGED_CU is the path of the source. uint4 keeps its alignment, so a wide access to an address
// that is not a multiple of 16 shows under -fsanitize=alignment.
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct Index {
    unsigned x, y, z;
};
static Index blockIdx, threadIdx, blockDim;

#define __device__
#define __global__
#define __forceinline__ inline
#include PAGED_CU

extern "C" void launch(int gather, const unsigned* grid, unsigned threads, const i64* segments,
                       const i64* blocks, const i64* rows, byte* packed, i64 row_stride) {
    blockDim = {threads, 1, 1};
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++)
                for (unsigned t = 0; t < threads; t++) {
                    blockIdx = {x, y, z};
                    threadIdx = {t, 0, 0};
                    (gather ? kvstrata_gather : kvstrata_scatter)(segments, blocks, rows, packed,
                                                                  row_stride);
                }
}
