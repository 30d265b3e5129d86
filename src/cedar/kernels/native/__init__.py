"""Native kernels: C++ sources, their build and the ctypes binding. Nothing here imports torch."""
