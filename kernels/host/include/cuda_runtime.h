// Everything is in cuda_host.hpp, which is included before any kernel.
