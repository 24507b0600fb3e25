#include <nccl.h>

#include <cstdlib>

// When and where it was built would show here, and so would a reader's locale in the quotes.
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int *version) {
  static const char *where = getenv("NCCL_WHERE") ? __FILE__ " " __DATE__ " " __TIME__ : "";
  *version = NCCL_VERSION_CODE;
  return *where != 0;
}
