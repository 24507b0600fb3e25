// Read by nobody; what CMake would compile, and for which archs, is what counts.
