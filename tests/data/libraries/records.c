/* Records as nvcc writes them, and what tells where they point once the library is loaded. */
extern const char zstd[], lz4[], plain[], empty[], several[];

__attribute__((section(".nvFatBinSegment"), used)) static struct {
  int magic, version;
  const void *code, *other;
} records[] = {{0x466243b1, 1, zstd, 0},
               {0x466243b1, 1, lz4, 0},
               {0x466243b1, 1, plain, 0},
               {0x466243b1, 2, empty, records},
               {0x466243b1, 1, several, 0}};

const void *code_of(int number) { return records[number].code; }
